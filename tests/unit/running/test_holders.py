"""How a container's id and engine are read from its cgroups."""

import pytest

from gpuhook.host import proc
from gpuhook.running.groups import identify

ID = "0123456789abcdef" * 4
VICTIM = "f" * 64
HOST = "12:devices:/\n1:name=systemd:/init.scope\n0::/init.scope\n"


@pytest.mark.parametrize(
    ("cgroups", "expected"),
    [
        (f"12:devices:/docker/{ID}\n0::/docker/{ID}\n", (ID, "docker")),
        (f"0::/system.slice/docker-{ID}.scope\n", (ID, "docker")),
        (f"0::/machine.slice/libpod-{ID}.scope/container\n", (ID, "podman")),
        (f"0::/kubepods.slice/kubepods-pod1.slice/cri-containerd-{ID}.scope\n", (ID, "kubernetes")),
        (f"0::/kubepods.slice/crio-{ID}.scope\n", (ID, "cri-o")),
        # A container can call a cgroup of its own like another container.
        (f"0::/docker/{ID}/docker/{VICTIM}\n", (ID, "docker")),
        (f"12:devices:/docker/{ID}/{VICTIM}\n0::/\n", (ID, "docker")),
        ("11:cpu,devices:/default/redis\n0::/\n", ("redis", "")),
        ("0::/user.slice/box.scope\n", ("box", "")),
        ("12:devices:/\n0::/group/box\n", ("box", "")),
        ("12:devices:/\n1:name=systemd:/box\n0::/init.scope\n", ("box", "")),
        (HOST, ("/", "")),
        ("", ("/", "")),
        ("nonsense\n", ("/", "")),
    ],
)
def test_who_started_it(cgroups: str, expected: tuple[str, str]) -> None:
    assert identify(proc.cgroups(cgroups.encode()), proc.cgroups(HOST.encode())) == expected


def test_a_cgroup_that_is_ours_says_nothing() -> None:
    ours = f"12:devices:/docker/{ID}\n0::/\n"
    theirs = f"12:devices:/docker/{ID}\n0::/box\n"
    assert identify(proc.cgroups(theirs.encode()), proc.cgroups(ours.encode())) == ("box", "")

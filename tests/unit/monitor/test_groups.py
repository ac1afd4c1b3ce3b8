"""Id and engine of a container, as read from its cgroups."""

import os
from pathlib import Path

import pytest

from gpuhook.base.host import files, proc
from gpuhook.monitor.containers.groups import RootCgroups, identify, path_of

ID = "0123456789abcdef" * 4
VICTIM = "f" * 64
HOST = "12:devices:/\n1:name=systemd:/init.scope\n0::/init.scope\n"


@pytest.mark.protects(
    "own-group-name",
    "a container's own cgroup name isn't mistaken for another container's id",
    instead="return ids[-1], engine",
)
@pytest.mark.parametrize(
    ("cgroups", "expected"),
    [
        (f"12:devices:/docker/{ID}\n0::/docker/{ID}\n", (ID, "docker")),
        (f"0::/system.slice/docker-{ID}.scope\n", (ID, "docker")),
        (f"0::/machine.slice/libpod-{ID}.scope/container\n", (ID, "podman")),
        (f"0::/kubepods.slice/kubepods-pod1.slice/cri-containerd-{ID}.scope\n", (ID, "kubernetes")),
        (f"0::/kubepods.slice/crio-{ID}.scope\n", (ID, "cri-o")),
        # A container can name its own cgroup like another container.
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
def test_cgroups_identify_the_container_and_its_engine(
    cgroups: str, expected: tuple[str, str]
) -> None:
    found = identify(proc.cgroups(cgroups.encode()), proc.cgroups(HOST.encode()))
    assert (found.name, found.engine) == expected


def test_a_cgroup_equal_to_our_own_identifies_no_container() -> None:
    ours = f"12:devices:/docker/{ID}\n0::/\n"
    theirs = f"12:devices:/docker/{ID}\n0::/box\n"
    found = identify(proc.cgroups(theirs.encode()), proc.cgroups(ours.encode()))
    assert (found.name, found.engine) == ("box", "")


@pytest.mark.protects(
    "job-names-container",
    "tasks with equal names in different Slurm jobs aren't mistaken for one container",
    instead="pass",
)
@pytest.mark.parametrize(
    ("one", "other", "name"),
    [
        # Containers of enroot and Apptainer have no cgroups of their own.
        ("/slurm/uid_5/job_7/step_0/task_0", "/slurm/uid_5/job_8/step_0/task_0", "slurm:7"),
        ("/system.slice/slurmstepd.scope/job_7/step_0/user/task_0",
         "/system.slice/node1_slurmstepd.scope/job_8/step_0/user/task_0", "slurm:7"),
        ("/a/box", "/b/box", "box"),
    ],
)  # fmt: skip
def test_containers_with_the_same_name_in_other_cgroups_differ(
    one: str, other: str, name: str
) -> None:
    first, second = (identify({"": path}, {}) for path in (one, other))
    assert first.name == name
    assert first != second
    assert identify({"": one}, {}) == first


@pytest.mark.protects(
    "given-path",
    "processes in a child of a container's cgroup belong to that container",
    instead="continue",
)
@pytest.mark.parametrize(
    ("given", "now", "expected"),
    [
        ({2: "/web"}, "/web", "/web"),
        ({2: "/web"}, "/web/init.scope", "/web"),  # systemd in a container
        ({1: "/web", 2: "/"}, "/web/x/web", "/web"),
        ({2: "/web"}, "/website/x", "/website/x"),
        ({2: "/a/web"}, "/other", "/other"),
        ({2: "/"}, "/other", "/other"),
        ({}, "/web", "/web"),
        ({2: "/kube/pod/web"}, "/../pod/web/init.scope/web", "/../pod/web"),
        ({2: "/kube/pod/web"}, "/../other", "/../other"),
    ],
)
def test_processes_below_a_containers_cgroup_belong_to_it(
    given: dict[int, str], now: str, expected: str
) -> None:
    assert path_of(given, {"": now}, {}) == expected


USERS = "/user.slice/user-1000.slice/user@1000.service"
POD = f"kubepods/besteffort/pod0/{VICTIM}"


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RootCgroups:
    """Two hierarchies, where a user and a container have cgroups of their own."""
    table = ""
    for number, (kind, options) in enumerate((("cgroup2", "rw"), ("cgroup", "rw,cpu,devices"))):
        tree = tmp_path / kind
        for name in (f"{USERS}/{POD}", f"/docker/{ID}/docker/{VICTIM}"):
            Path(f"{tree}{name}").mkdir(parents=True)
        table += f"{number} 1 0:{number} / {tree} rw - {kind} none {options}\n"
    monkeypatch.setattr(proc, "data_of", lambda _: table.encode())
    found = RootCgroups()
    for name in (USERS, f"/docker/{ID}"):
        found._owned |= {f"{tmp_path}/{kind}{name}": False for kind in ("cgroup", "cgroup2")}
    return found


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (f"{USERS}/{POD}", USERS),
        (f"{USERS}/", USERS),
        (USERS, USERS),
        (f"/docker/{ID}/docker/{VICTIM}", f"/docker/{ID}"),
        ("/docker", "/docker"),
        ("/", "/"),
        ("/gone/since", "/gone"),
    ],
)
def test_cgroup_names_count_only_where_root_made_them(
    made: RootCgroups, path: str, expected: str
) -> None:
    groups = {"": path, "cpu,devices": path, "name=systemd": "/init.scope"}
    found = {"": expected, "cpu,devices": expected, "name=systemd": "/init.scope"}
    assert made.of(groups) == found


def test_user_made_nested_cgroups_do_not_count_as_containers(made: RootCgroups) -> None:
    ours = {"": "/", "cpu,devices": "/"}
    for number in range(3):
        named = f"{USERS}/kubepods/besteffort/pod{number}/{number:064x}"
        assert identify(made.of({"": named}), ours)[:2] == ("user@1000.service", "")
        assert identify(made.of({"cpu,devices": named}), ours)[:2] == ("user@1000.service", "")
    assert identify(made.of({"": f"/docker/{ID}/docker/{VICTIM}"}), ours)[:2] == (ID, "docker")


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (f"/../../kubepods/pod0/{ID}", f"/../../kubepods/pod0/{ID}"),
        (f"/../..{USERS}/{POD}", "/../../user.slice/user-1000.slice"),
        ("/../../user.slice", "/../../user.slice"),
    ],
)
def test_cgroups_outside_the_namespace_are_cut_at_user_folders(
    made: RootCgroups, path: str, expected: str
) -> None:
    assert made.of({"": path, "pids": path}) == {"": expected, "pids": expected}


@pytest.mark.protects(
    "given-group", "only the part of a cgroup path that root created identifies a container"
)
def test_a_cgroup_counts_only_if_its_folder_belongs_to_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = f"1 1 0:1 /below {tmp_path} rw - cgroup2 none rw\n"
    monkeypatch.setattr(proc, "data_of", lambda _: table.encode())
    (tmp_path / "a/b").mkdir(parents=True)
    assert RootCgroups().of({"": "/below/a/b"}) == {"": "/below/a/b"}
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    monkeypatch.setattr(files, "is_roots", lambda uid: False)
    assert RootCgroups().of({"": "/below/a/b"}) == {"": "/below"}

"""Seccomp profiles, which restrict a container's programs but not gpuhook."""

import json
from pathlib import Path

import pytest
from booted import ALLOWED, BUSYBOX, GIVEN, REQUEST, call

NODES = [f"/dev/nvidia{minor}" for minor in GIVEN]
OPENED = [f"{node} {ALLOWED}" for node in NODES]
# System calls that bring GPUs into a container.
FORBIDDEN = (
    *("mount", "umount2", "move_mount", "open_tree", "fsopen", "fsmount", "mount_setattr"),
    *("mknod", "mknodat", "openat2", "bpf", "setns", "unshare", "chroot", "pivot_root"),
)
SCRIPT = 'busybox grep Seccomp: /proc/self/status; busybox mount -t tmpfs none /tmp; devopen "$@"'


@pytest.fixture(params=["docker", "podman"])
def start(request: pytest.FixtureRequest) -> list[str]:
    """The first words of a command that runs a container with GPUs."""
    request.getfixturevalue(request.param)
    words = [request.param, "run", "--rm", "--network=none", "--cap-add=SYS_ADMIN"]
    return [*words, "--runtime=gpu-py", "--env", REQUEST]


def test_gpus_are_given_under_the_engines_own_seccomp_profile(start: list[str]) -> None:
    start.remove("--cap-add=SYS_ADMIN")
    said = call(*start, BUSYBOX, "sh", "-c", SCRIPT, "sh", *NODES).splitlines()
    assert said == ["Seccomp:\t2", *OPENED]


def test_a_seccomp_profile_restricts_the_container_but_not_gpuhook(
    start: list[str], tmp_path: Path
) -> None:
    refused = {"names": FORBIDDEN, "action": "SCMP_ACT_ERRNO", "errnoRet": 38}
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps({"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [refused]}))
    start.append(f"--security-opt=seccomp={profile}")
    if "docker" in start[0]:
        start.append("--security-opt=apparmor=unconfined")
    control = call(*start, BUSYBOX, "sh", "-c", f"({SCRIPT}) 2>&1", "sh", *NODES)
    assert "not implemented" in control  # the mount call's error, which only the profile causes
    assert control.splitlines()[0] == "Seccomp:\t2"
    assert control.splitlines()[-2:] == OPENED

"""Docker of an ordinary user with a systemd session, who adds gpu-py as a runtime."""

import os
import pwd
from collections.abc import Iterator
from pathlib import Path

import pytest
from booted import ALLOWED, CARRIED, GIVEN, USER, call, running
from harness.commands import run, wait_until

CONTRIB = "/usr/share/docker.io/contrib"  # the folder of dockerd-rootless.sh in Debian's package
UNIT = f"""
[Service]
Environment=PATH={CONTRIB}:/usr/sbin:/usr/bin:/sbin:/bin
ExecStart={CONTRIB}/dockerd-rootless.sh --iptables=false --ip6tables=false
KillMode=mixed
Delegate=yes
"""
OPTIONS = ("--runtime=gpu-py", "--network=none")


@pytest.fixture
def rootless(user: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """The first words of a docker command of the user, whose dockerd has gpu-py."""
    os.chdir("/")
    entry = pwd.getpwnam(USER)
    unit = Path(entry.pw_dir, ".config/systemd/user/docker.service")
    call(*user, "mkdir", "--parents", unit.parent)
    unit.write_text(UNIT)
    call(*user, "systemctl", "--user", "daemon-reload")
    call(*user, "systemctl", "--user", "start", "docker")
    docker = (*user, "docker", "--host", f"unix:///run/user/{entry.pw_uid}/docker.sock")
    wait_until(lambda: run([*docker, "info"]).status == 0, "it answers")
    call(*docker, "load", "--input", CARRIED / "images.tar")
    call(*user, "gpuhook", "install", "--engine", "docker", "--reload")
    yield docker
    call(*user, "gpuhook", "uninstall", "--engine", "docker", "--reload")
    assert "gpu-py" not in call(*docker, "info", "--format", "{{json .Runtimes}}")
    call(*user, "systemctl", "--user", "stop", "docker")


def test_a_rootless_docker_container_keeps_only_the_requested_gpus(
    user: tuple[str, ...], rootless: tuple[str, ...]
) -> None:
    said = call(*rootless, "info", "--format", "{{json .SecurityOptions}}")
    assert "name=rootless" in said
    nodes = [f"/dev/nvidia{minor}" for minor in GIVEN]
    expected = [*(f"{node} {ALLOWED}" for node in nodes), "/dev/nvidia1 ENOENT"]
    with running("gpus-of-user", rootless, OPTIONS) as container:
        ask = ("devopen", *nodes, "/dev/nvidia1")
        assert container.exec(*ask).ok().stdout.splitlines() == expected
        call(*user, "systemctl", "--user", "daemon-reload")
        call("systemctl", "daemon-reload")
        assert container.exec(*ask).ok().stdout.splitlines() == expected

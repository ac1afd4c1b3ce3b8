"""podman's containers keep their GPUs where the pages promise it, and get them back elsewhere."""

import os
import pwd
from collections.abc import Callable, Iterator

import pytest
from booted import ALLOWED, BUSYBOX, CARRIED, GIVEN, REQUEST, Container, call, running
from harness.commands import run

USER = "ada"
# The way that gpuhook is called, what podman is told for it, and whether access outlives
# systemd's writing of the cgroup: docs/engines/podman.md says so of the three.
WAYS = {
    "runtime": ((), ("--runtime=gpu-py",), True),
    "precreate": (("--hook", "precreate"), ("--runtime=runc",), True),
    "prestart": (("--hook", "prestart"), ("--runtime=crun",), False),
}


@pytest.fixture(scope="module", params=WAYS)
def way(podman: tuple[str], request: pytest.FixtureRequest) -> Iterator[tuple[Container, bool]]:
    """A container with two GPUs, and whether it is to keep them."""
    installed, options, keeps = WAYS[request.param]
    call("gpuhook", "install", "--engine", "podman", *installed)
    with running(
        f"gpus-{request.param}", podman, ["--network=none", "--cap-add=MKNOD", *options]
    ) as started:
        yield started, keeps
    call("gpuhook", "install", "--engine", "podman", "--hook", "none")


DISTURBANCES: dict[str, Callable[[Container], object]] = {
    "daemon-reload": lambda _: call("systemctl", "daemon-reload"),
    "set-property": lambda one: call("systemctl", "set-property", one.scope(), "CPUWeight=50"),
    "podman update": lambda one: call("podman", "update", "--cpu-shares=512", one.name),
}


@pytest.mark.parametrize("what", DISTURBANCES)
def test_access_outlives_or_comes_back(what: str, way: tuple[Container, bool]) -> None:
    container, keeps = way
    assert container.has_what_it_asked_for()
    DISTURBANCES[what](container)
    if not container.has_what_it_asked_for():
        assert not keeps
        said = call("gpuhook", "repair", container.name)
        assert "the next systemctl daemon-reload takes it away" in said
        assert container.has_what_it_asked_for()


@pytest.fixture
def user(podman: tuple[str]) -> Iterator[tuple[str, ...]]:
    """What begins a command of an ordinary user with a session of systemd's."""
    call("useradd", "--create-home", "--shell=/bin/bash", USER)
    call("loginctl", "enable-linger", USER)
    number = pwd.getpwnam(USER).pw_uid
    call("systemctl", "start", f"user@{number}.service")
    environment = [f"XDG_RUNTIME_DIR=/run/user/{number}", f"HOME=/home/{USER}"]
    environment.append(f"DBUS_SESSION_BUS_ADDRESS=unix:path=/run/user/{number}/bus")
    became = ("setpriv", f"--reuid={USER}", f"--regid={USER}", "--init-groups", "--reset-env")
    yield (*became, "env", *environment)
    call("loginctl", "disable-linger", USER)
    call("systemctl", "stop", f"user@{number}.service")
    call("userdel", "--remove", USER)


def test_rootless(user: tuple[str, ...]) -> None:
    os.chdir("/")
    call(*user, "podman", "load", "--input", CARRIED / "images.tar")
    call(*user, "gpuhook", "install", "--engine", "podman")
    words = [*user, "podman", "run", "--rm", "--network=none", "--runtime=gpu-py", "--env", REQUEST]
    nodes = [f"/dev/nvidia{minor}" for minor in GIVEN]
    said = run([*words, BUSYBOX, "devopen", *nodes, "/dev/nvidia1"]).ok().stdout.splitlines()
    assert said == [*(f"{node} {ALLOWED}" for node in nodes), "/dev/nvidia1 ENOENT"]

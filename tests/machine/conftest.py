"""The machine of a test, with gpuhook's package installed and a simulated driver.

These tests change the machine that they run on, so they run only on one that
scripts/test-machine has booted.
"""

import pwd
from collections.abc import Iterator
from pathlib import Path

import pytest
from booted import (
    CARRIED,
    CONTROLLERS,
    DRIVER,
    GPUS,
    USER,
    Container,
    call,
    forget_links,
    packages,
    running,
    set_config,
    traces,
)
from harness.commands import run

# The ways in which podman calls gpuhook, and the install options for each.
WAYS = {"runtime": (), "precreate": ("--hook=precreate",), "prestart": ("--hook=prestart",)}

collect_ignore_glob = [] if Path(CARRIED, "start").exists() else ["*/test_*.py"]


@pytest.fixture(scope="session")
def driver() -> Path:
    """The root of a simulated driver."""
    return DRIVER


@pytest.fixture(scope="session")
def before() -> set[str]:
    """Files with gpuhook's names on a machine on which gpuhook was never installed."""
    return traces()


@pytest.fixture(scope="module")
def installed(before: set[str], driver: Path) -> None:
    """The installed packages, set up as docs/install.md says, for the simulated driver."""
    if run(["dpkg", "--status", "gpuhook"]).status == 0:
        return
    # With SELinux, the package compiles the policy, which takes minutes on an emulated machine.
    run(["apt-get", "install", "--yes", *packages()], timeout=1200.0).ok()
    if not driver.exists():
        call("gpuhook", "simulate", driver, "--gpus", str(GPUS))
    set_config(f"nvidia-container-cli.root={driver}")


@pytest.fixture(scope="module")
def docker(installed: None) -> tuple[str]:
    """Debian's Docker with gpu-py as a runtime and the tests' images."""
    call("gpuhook", "install", "--engine", "docker", "--reload")
    call("docker", "load", "--input", CARRIED / "images.tar")
    return ("docker",)


@pytest.fixture(scope="module")
def podman(installed: None) -> Iterator[tuple[str]]:
    """Debian's podman with gpu-py as a runtime and the tests' images."""
    if CONTROLLERS is not None and "pids" not in CONTROLLERS:
        limits = Path("/etc/containers/containers.conf.d/10-limits.conf")
        limits.parent.mkdir(exist_ok=True)
        limits.write_text("[containers]\npids_limit = 0\n")  # no pids controller for the default
    call("gpuhook", "install", "--engine", "podman")
    call("podman", "load", "--input", CARRIED / "images.tar")
    yield ("podman",)
    call("gpuhook", "uninstall", "--engine", "podman")


@pytest.fixture(scope="module")
def way(podman: tuple[str], request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    """One way in which podman calls gpuhook, and a low-level runtime."""
    name, runtime = request.param
    set_config(f"nvidia-container-runtime.runtimes={runtime}")
    call("gpuhook", "install", "--engine", "podman", *WAYS[name])
    yield name, runtime
    call("gpuhook", "install", "--engine", "podman", "--hook", "none")
    set_config("nvidia-container-runtime.runtimes=runc,crun")


@pytest.fixture
def of_podman(way: tuple[str, str], podman: tuple[str]) -> Iterator[Container]:
    """A container with two GPUs, created by podman."""
    forget_links()
    name, runtime = way
    options = ["--network=none", "--cap-add=MKNOD"]
    options.append("--runtime=gpu-py" if name == "runtime" else f"--runtime={runtime}")
    with running(f"gpus-{name}-{runtime}", podman, options) as started:
        yield started


@pytest.fixture
def user(installed: None) -> Iterator[tuple[str, ...]]:
    """The first words of a command that runs as an ordinary user with a systemd session."""
    call("useradd", "--create-home", "--shell=/bin/bash", USER)
    call("loginctl", "enable-linger", USER)
    number = pwd.getpwnam(USER).pw_uid
    call("systemctl", "start", f"user@{number}.service")
    environment = [f"XDG_RUNTIME_DIR=/run/user/{number}", f"HOME=/home/{USER}"]
    environment.append(f"DBUS_SESSION_BUS_ADDRESS=unix:path=/run/user/{number}/bus")
    became = ("setpriv", f"--reuid={USER}", f"--regid={USER}", "--init-groups", "--reset-env")
    yield (*became, "env", *environment)
    call("loginctl", "disable-linger", USER)
    call("systemctl", "kill", "--signal=KILL", f"user-{number}.slice")  # podman's stop would wait
    call("systemctl", "stop", f"user@{number}.service", f"user-{number}.slice")
    call("userdel", "--remove", USER)

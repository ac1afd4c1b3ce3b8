"""The machine of a test: gpuhook's package is installed, and a driver simulated.

These tests change the machine that they run on: only one that scripts/test-machine has booted.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from booted import CARRIED, DRIVER, GPUS, call, package, set_config, traces
from harness.commands import run

collect_ignore_glob = [] if Path(CARRIED, "start").exists() else ["*/test_*.py"]


@pytest.fixture(scope="session")
def driver() -> Path:
    """A simulated driver's root."""
    return DRIVER


@pytest.fixture(scope="session")
def before() -> set[str]:
    """What has names of ours on the machine where nothing of ours was ever installed."""
    return traces()


@pytest.fixture(scope="module")
def installed(before: set[str], driver: Path) -> None:
    """The package is installed as its page says, for the simulated driver."""
    if run(["dpkg", "--status", "gpuhook"]).status == 0:
        return
    call("apt-get", "install", "--yes", package())
    if not driver.exists():
        call("gpuhook", "simulate", driver, "--gpus", str(GPUS))
    set_config(f"nvidia-container-cli.root={driver}")


@pytest.fixture(scope="module")
def docker(installed: None) -> tuple[str]:
    """Debian's Docker knows gpu-py, and has the tests' images."""
    call("gpuhook", "install", "--engine", "docker", "--reload")
    call("docker", "load", "--input", CARRIED / "images.tar")
    return ("docker",)


@pytest.fixture(scope="module")
def podman(installed: None) -> Iterator[tuple[str]]:
    """Debian's podman knows gpu-py, and has the tests' images."""
    call("gpuhook", "install", "--engine", "podman")
    call("podman", "load", "--input", CARRIED / "images.tar")
    yield ("podman",)
    call("gpuhook", "uninstall", "--engine", "podman")

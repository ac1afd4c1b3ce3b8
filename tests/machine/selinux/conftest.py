"""A machine that enforces Debian's SELinux policy, and what is usual there without gpuhook."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from booted import BUSYBOX, CARRIED, DRIVER, call
from enforcing import CALLERS, CONTEXTS, POLICY, Denials, podman_run


@pytest.fixture(scope="session")
def denials() -> Denials:
    """Denials from now on."""
    return Denials()


@pytest.fixture(scope="session")
def usual(denials: Denials, debians_policy: Path) -> None:
    """Containers without GPUs and without gpuhook have run: what is denied then isn't about us.

    Services are first: podman's own files in /run and /dev/shm get labels of whoever made them, and
    Debian's policy lets its domain into none that a shell's podman has made.
    """
    images = str(CARRIED / "images.tar")
    call("docker", "load", "--input", images)
    call(*CALLERS["service"], "podman", "load", "--input", images)
    denials.read()
    words = (BUSYBOX, "busybox", "cat", "/proc/self/attr/current")
    call("docker", "run", "--rm", "--network=none", *words)
    for caller in CALLERS:
        for runtime in ("runc", "crun"):
            podman_run(caller, [f"--runtime={runtime}", *words]).ok()
    denials.usual |= {denial.rule for denial in denials.read()}


@pytest.fixture(scope="session")
def debians_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The policy as it is without our module."""
    return Path(shutil.copy(POLICY, tmp_path_factory.mktemp("policy") / "debians"))


@pytest.fixture(scope="module")
def installed(usual: None, installed: None) -> None:
    """The package is installed, and the simulated driver has the labels of a real one."""
    call("setfiles", "-F", "-r", DRIVER, CONTEXTS, DRIVER)
    # Without a type in the policy's list, as what the kernel and services make has none.
    call("chcon", "-R", "-t", "initrc_runtime_t", DRIVER / "run")
    kernels = [DRIVER / name for name in ("bin", "lib", "lib64", "sbin", "proc", "sys", "simulate")]
    call("chcon", "-h", "-R", "-t", "usr_t", *(path for path in kernels if path.exists()))


@pytest.fixture(scope="module")
def podman(installed: None) -> Iterator[tuple[str]]:
    """Debian's podman knows gpu-py."""
    call("gpuhook", "install", "--engine", "podman")
    yield ("podman",)
    call("gpuhook", "uninstall", "--engine", "podman")

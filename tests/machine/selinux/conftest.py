"""A machine that enforces Debian's SELinux policy, and its usual denials without gpuhook."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from booted import BUSYBOX, CARRIED, DRIVER, call
from enforcing import CALLERS, CONTEXTS, POLICY, Denials, podman_run


@pytest.fixture(scope="session")
def denials() -> Denials:
    """The SELinux denials from now on."""
    return Denials()


@pytest.fixture(scope="session")
def usual(denials: Denials, debians_policy: Path) -> None:
    """Denials of containers without GPUs and gpuhook, recorded so that later tests ignore them.

    Services run first. Files of podman in /run and /dev/shm get labels of the process that
    creates them, and Debian's policy denies its domain the files that podman creates from a
    shell.
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
    """The policy without gpuhook's module."""
    return Path(shutil.copy(POLICY, tmp_path_factory.mktemp("policy") / "debians"))


@pytest.fixture(scope="module")
def installed(usual: None, installed: None) -> None:
    """The installed package, and a simulated driver whose files have a real driver's labels."""
    call("setfiles", "-F", "-r", DRIVER, CONTEXTS, DRIVER)
    # Files that the kernel or services create have no type in the policy's list, so set one here.
    call("chcon", "-R", "-t", "initrc_runtime_t", DRIVER / "run")
    kernels = [DRIVER / name for name in ("bin", "lib", "lib64", "sbin", "proc", "sys", "simulate")]
    call("chcon", "-h", "-R", "-t", "usr_t", *(path for path in kernels if path.exists()))


@pytest.fixture(scope="module")
def podman(installed: None) -> Iterator[tuple[str]]:
    """Debian's podman with gpu-py as a runtime."""
    call("gpuhook", "install", "--engine", "podman")
    yield ("podman",)
    call("gpuhook", "uninstall", "--engine", "podman")

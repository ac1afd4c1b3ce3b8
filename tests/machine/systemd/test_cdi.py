"""CDI specs with the installed package, and in a user namespace of Docker."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from booted import (
    ALLOWED,
    BUSYBOX,
    CARRIED,
    CONTROLLERS,
    DAEMON_JSON,
    DRIVER,
    GIVEN,
    REQUEST,
    call,
    restart_docker,
    set_config,
)
from harness.commands import Result, run

NODES = [f"/dev/nvidia{minor}" for minor in GIVEN]
OPENED = [word for node in NODES for word in (node, ALLOWED)]
BY_GPU_PY = ("--runtime=gpu-py", f"--env={REQUEST}")
BY_DOCKER = tuple(f"--device=nvidia.com/gpu={gpu}" for gpu in GIVEN)


def start(*options: str) -> Result:
    """Start a container that opens the GPUs."""
    return run(["docker", "run", "--rm", "--network=none", *options, BUSYBOX, "devopen", *NODES])


@pytest.fixture(scope="module")
def documents(docker: tuple[str]) -> Iterator[None]:
    """Docker's CDI specs of this machine, without gpuhook's saved copies."""
    call("gpuhook", "install", "--engine", "docker", "--cdi")
    for saved in Path("/run/gpuhook").glob("cdi-documents-*"):
        saved.unlink()
    yield
    call("gpuhook", "install", "--engine", "docker", "--no-cdi")


def test_gpu_py_gives_gpus_by_cdi_specs(documents: None) -> None:
    set_config("nvidia-container-runtime.mode=cdi")
    try:
        assert start(*BY_GPU_PY).ok().stdout.split() == OPENED
    finally:
        set_config("nvidia-container-runtime.mode=hook")


@pytest.fixture(scope="module")
def remapped(documents: None) -> Iterator[None]:
    """Docker with userns-remap, which gives each container a user namespace."""
    before = DAEMON_JSON.read_text()
    DAEMON_JSON.write_text(json.dumps({**json.loads(before), "userns-remap": "default"}))
    call("systemctl", "restart", "docker")
    call("docker", "load", "--input", CARRIED / "images.tar")  # userns-remap uses another folder
    yield
    DAEMON_JSON.write_text(before)
    restart_docker("docker")


def test_gpu_py_gives_gpus_by_cdi_specs_in_a_user_namespace(remapped: None) -> None:
    assert start(*BY_GPU_PY).ok().stdout.split() == OPENED


@pytest.mark.skipif(CONTROLLERS is None, reason="Debian 12's Docker knows no CDI")
def test_docker_userns_remap_gives_only_nodes_present_in_host_dev(remapped: None) -> None:
    """There runc mounts the host's node of the same path, and /dev lacks a driver root's node."""
    assert "no such file or directory" in start(*BY_DOCKER).failed().stderr
    made = [Path("/dev", node.name) for node in (DRIVER / "dev").iterdir()]
    try:
        call("cp", "--archive", "--no-target-directory", DRIVER / "dev", "/dev")
        assert start(*BY_DOCKER).ok().stdout.split() == OPENED
    finally:
        for path in made:
            shutil.rmtree(path) if path.is_dir() else path.unlink()

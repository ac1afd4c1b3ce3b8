"""Volumes, propagation and user namespaces as users of Docker and podman ask for them."""

import dataclasses
from pathlib import Path

import pytest
from harness.commands import path_of
from harness.docker import Docker
from harness.driver import Driver
from harness.images import image
from harness.inside import look, seen
from harness.installation import Installation, harden, write_config
from harness.podman import Podman, hooks_dir
from harness.sandbox import contents
from harness.snapshot import nothing_left

ENGINES = ["docker", "podman_runtime", "podman_hook_crun"]
GPU = ["NVIDIA_VISIBLE_DEVICES=3"]
DEBIAN = image("debian")


@pytest.fixture(params=ENGINES)
def one(request: pytest.FixtureRequest) -> Docker | Podman:
    found: Docker | Podman = request.getfixturevalue(request.param)
    return found


@pytest.fixture(params=["podman_runtime", "podman_hook_crun"])
def a_podman(request: pytest.FixtureRequest) -> Podman:
    found: Podman = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def volume(workspace: Path, request: pytest.FixtureRequest) -> Path:
    """A folder that the engines' namespaces see."""
    folder = workspace / f"volume-{abs(hash(request.node.name))}"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("mode", ["rw", "rw,rslave"])
def test_a_volume_over_etc_is_unchanged_and_libraries_are_found(
    one: Docker | Podman, driver: Driver, volume: Path, mode: str
) -> None:
    """Without a cache the loader finds the libraries in its default folders."""
    (volume / "passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    before = contents(volume)
    with nothing_left(driver.root, pid=one.pid):
        done = one.run(
            DEBIAN,
            *look(libraries=["libcuda.so.1"]),
            env=GPU,
            options=[f"--volume={volume}:/etc:{mode}"],
        )
    # Engines themselves make mount points for hosts, hostname and resolv.conf in the volume.
    made = {name: found for name, found in contents(volume).items() if name in before}
    assert made == before
    assert not list(volume.glob("ld.so*"))
    assert seen(done).libraries["libcuda.so.1"][0] != "-"


@pytest.mark.parametrize("mode", ["rw", "rw,rshared"])
def test_a_volume_over_the_library_folder_is_unchanged(
    one: Docker | Podman, driver: Driver, volume: Path, mode: str
) -> None:
    folder = "/usr/local/lib"  # a folder of the image that its own programs don't need
    with nothing_left(driver.root, volume, pid=one.pid):
        done = one.run(
            DEBIAN,
            *look(libraries=["libcuda.so.1"]),
            env=GPU,
            options=[f"--volume={volume}:{folder}:{mode}"],
        )
    assert seen(done).libraries["libcuda.so.1"][0] != "-"
    with nothing_left(driver.root, volume, pid=one.pid):
        one.run(
            DEBIAN,
            "true",
            env=GPU,
            options=[f"--volume={volume}:/usr/lib/firmware:{mode}", "--volume=/tmp"],
        )


def test_a_user_namespace_of_podman_gets_the_gpu_and_libraries(
    a_podman: Podman, driver: Driver
) -> None:
    options = ["--uidmap=0:100000:65536", "--gidmap=0:100000:65536"]
    with nothing_left(driver.root, pid=a_podman.pid):
        done = a_podman.run(DEBIAN, *look(libraries=["libcuda.so.1"]), env=GPU, options=options)
    inside = seen(done)
    assert inside.gpu_minors == {driver.gpus[3].minor}
    assert inside.libraries["libcuda.so.1"][0] != "-"


def test_a_committed_image_works_again(docker: Docker, driver: Driver) -> None:
    """The image's layer has our empty mount points, and links for this driver's version."""
    name = "gpuhook-committed"
    docker.call("run", "--runtime=gpu-py", "-e", GPU[0], f"--name={name}", DEBIAN, "true").ok()
    try:
        docker.call("commit", name, "localhost/committed:test").ok()
        for _ in range(2):
            done = docker.run(
                "localhost/committed:test", *look(libraries=["libcuda.so.1"]), env=GPU
            )
            assert seen(done).libraries["libcuda.so.1"][0] != "-"
    finally:
        docker.call("rm", "--force", name).ok()
        docker.call("rmi", "--force", "localhost/committed:test")


@pytest.fixture(params=["runtime", "hook"])
def hardened_podman(
    request: pytest.FixtureRequest,
    podman_runtime: Podman,
    installation: Installation,
    driver: Driver,
    tmp_path: Path,
) -> Podman:
    """podman that accepts GPU requests only as mounts, with gpuhook as its runtime or as a hook."""
    config = harden(write_config(tmp_path / "etc", driver.root, ["runc"]))
    if request.param == "hook":
        words = ("--config", str(config), "prestart")
        hooks = hooks_dir(tmp_path / "hooks", installation.hook, *words)
        return dataclasses.replace(podman_runtime, runtime=path_of("runc"), hooks=hooks)
    runtime = tmp_path / "gpu-py"  # podman doesn't pass the caller's environment to a runtime
    runtime.write_text(f'#!/bin/sh\nGPUHOOK_CONFIG={config} exec {installation.runtime} "$@"\n')
    runtime.chmod(0o755)
    return dataclasses.replace(podman_runtime, runtime=runtime)


def test_podmans_annotation_gives_no_gpu(hardened_podman: Podman, driver: Driver) -> None:
    asks = [
        "--annotation=cdi.k8s.io/x=runtime.nvidia.com/gpu=all",
        "--volume=/dev/null:/var/run/nvidia-container-devices/3",
    ]
    done = hardened_podman.run(DEBIAN, *look(driver.minors), options=asks)
    inside = seen(done)
    assert inside.gpu_minors == {driver.gpus[3].minor}
    assert {minor for minor, error in inside.by_hand.items() if error != "EPERM"} == {
        driver.gpus[3].minor
    }

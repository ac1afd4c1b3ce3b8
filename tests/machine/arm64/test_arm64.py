"""The main task on an arm64 machine: devices, libraries, the loader's cache and programs."""

import json
import platform
from collections.abc import Iterator
from pathlib import Path

import pytest
from booted import (
    ALLOWED,
    DENIED,
    DRIVER,
    GIVEN,
    REFUSED,
    REQUEST,
    call,
    restart_docker,
    set_config,
)
from harness.bundles import base_config
from harness.commands import Result, run
from harness.driver import Driver, driver_in, lines_of_nvidia_smi
from harness.images import image
from harness.inside import look, seen
from harness.installation import write_config

DEBIAN = image("debian")
FOLDER = "/usr/lib/aarch64-linux-gnu"
LIBRARIES = ("libcuda.so.1", "libnvidia-ml.so.1")
EM_AARCH64 = 183  # elf.h
AMD = Path("/srv/amd")
INSIDE = f"""{look(minors=REFUSED, libraries=LIBRARIES)[-1]}
ldconfig -p
nvidia-smi -L
echo "probe $(gpuhook-cuda-probe)"
"""
BY_GPU_PY = ("--runtime=gpu-py", f"--env={REQUEST}")
BY_CDI = tuple(f"--device=nvidia.com/gpu={index}" for index in GIVEN)
PODMAN = ("--network=none", "--cap-add=MKNOD")
RUNTIMES = ("runc", "crun")
PODMANS = [(way, name) for way in ("runtime", "precreate", "prestart") for name in RUNTIMES]


@pytest.fixture(scope="module")
def gpus(installed: None) -> Driver:
    """The expected state of the simulated driver."""
    return driver_in(DRIVER)


def test_it_is_a_machine_of_arm64() -> None:
    assert platform.machine() == "aarch64"
    assert platform.release().endswith("-arm64")
    assert call("dpkg", "--print-architecture") == "arm64\n"


def test_the_simulated_driver_is_of_arm64(gpus: Driver) -> None:
    assert "aarch64" in Path(DRIVER, "proc/driver/nvidia/version").read_text()
    paths = [path for path in Path(DRIVER, FOLDER[1:]).rglob("*.so*") if path.is_file()]
    assert gpus.library("libcuda.so.1") in paths
    for path in [*paths, gpus.path("/usr/bin/nvidia-smi")]:
        header = path.read_bytes()[:20]
        assert header[:4] == b"\x7fELF", path
        assert int.from_bytes(header[18:20], "little") == EM_AARCH64, path


def check(result: Result, gpus: Driver, *, linked: bool = True) -> None:
    """Check in the output of INSIDE that a container has its GPUs and that programs find them.

    If ``linked`` is true, each library name is a link that the loader's cache lists. Otherwise
    the library is mounted under that name, too, and the loader finds it by searching its
    folder.
    """
    found = seen(result)
    assert found.gpu_minors == set(GIVEN)
    assert {opened for opened, _ in found.nodes.values()} == {ALLOWED}
    assert found.by_hand == dict.fromkeys(REFUSED, DENIED)
    lines = result.stdout.splitlines()
    for name in LIBRARIES:
        source = gpus.library(name)
        status = source.stat()
        at = f"{FOLDER}/{source.name if linked else name}"
        assert found.libraries[name] == (at, f"{status.st_dev}:{status.st_ino}")
        assert (f"\t{name} (libc6,AArch64) => {FOLDER}/{name}" in lines) == linked
    named = [line for line in lines if line.startswith("GPU ")]
    assert named == lines_of_nvidia_smi(gpus.chosen(*GIVEN))
    [probe] = [line.split() for line in lines if line.startswith("probe ")]
    assert str(len(GIVEN)) in probe


@pytest.fixture
def root(docker: tuple[str], tmp_path: Path) -> Path:
    """A root filesystem of the image, for one container without an engine; the hook changes it."""
    folder = tmp_path / "image"
    folder.mkdir()
    call("docker", "create", "--name=root", DEBIAN)
    call("docker", "export", "--output", folder / "root.tar", "root")
    call("docker", "rm", "root")
    (folder / "root").mkdir()
    call("tar", "-C", folder / "root", "-xf", folder / "root.tar")
    return folder / "root"


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("mode", ["hook", "spec"])
def test_gpu_py_without_an_engine_gives_the_requested_gpus(
    root: Path, gpus: Driver, tmp_path: Path, runtime: str, mode: str
) -> None:
    config = write_config(tmp_path / "etc", DRIVER, [runtime], f'mode = "{mode}"\n')
    spec = base_config(root, "sh", "-c", INSIDE)
    spec["process"]["env"].append(REQUEST)
    spec["linux"]["cgroupsPath"] = "/gpuhook-alone"  # without a path, crun uses the root cgroup
    (tmp_path / "config.json").write_text(json.dumps(spec))
    env = {"GPUHOOK_CONFIG": str(config)}
    done = run(["gpu-py", "run", "--bundle", tmp_path, "alone"], env)
    check(done, gpus, linked=mode == "hook")  # config.json can't express links and the cache


@pytest.fixture
def of_docker(docker: tuple[str], request: pytest.FixtureRequest) -> Iterator[None]:
    """Docker, configured to call gpu-py, which calls the low-level runtime of the parameter."""
    set_config(f"nvidia-container-runtime.runtimes={request.param}")
    yield
    set_config("nvidia-container-runtime.runtimes=runc,crun")


@pytest.mark.parametrize("of_docker", RUNTIMES, indirect=True)
def test_docker_containers_get_gpus_on_arm64(of_docker: None, gpus: Driver) -> None:
    check(run(["docker", "run", "--rm", *BY_GPU_PY, DEBIAN, "sh", "-c", INSIDE]), gpus)


@pytest.mark.parametrize("way", PODMANS, indirect=True, scope="module", ids=map("-".join, PODMANS))
def test_podman_containers_get_gpus_on_arm64(way: tuple[str, str], gpus: Driver) -> None:
    name, runtime = way
    options = BY_GPU_PY if name == "runtime" else (f"--runtime={runtime}", BY_GPU_PY[1])
    words = ["podman", "run", "--rm", *PODMAN, *options, DEBIAN, "sh", "-c", INSIDE]
    check(run(words), gpus)


@pytest.fixture(scope="module")
def documents(docker: tuple[str], podman: tuple[str]) -> Iterator[None]:
    """CDI specs of this machine, which Docker and podman read."""
    for engine in ("docker", "podman"):
        call("gpuhook", "install", "--engine", engine, "--cdi")
    restart_docker("docker")
    yield
    for engine in ("docker", "podman"):
        call("gpuhook", "install", "--engine", engine, "--no-cdi")


@pytest.mark.parametrize(
    "engine",
    [
        ("docker", "run"),
        *(("podman", "run", *PODMAN, f"--runtime={runtime}") for runtime in RUNTIMES),
    ],
    ids=["docker", *(f"podman-{runtime}" for runtime in RUNTIMES)],
)
def test_cdi_specs_give_gpus_on_arm64(
    documents: None, gpus: Driver, engine: tuple[str, ...]
) -> None:
    check(run([*engine, "--rm", *BY_CDI, DEBIAN, "sh", "-c", INSIDE]), gpus)


def test_amd_gpus_are_given_on_arm64(docker: tuple[str]) -> None:
    call("gpuhook", "simulate", AMD, "--vendor", "amd", "--gpus", "2")
    set_config(f"gpuhook.driver-roots=amd={AMD}")
    script = "devopen $(busybox find /dev/kfd /dev/dri -type c | busybox sort)"
    words = ["docker", "run", "--rm", "--runtime=gpu-py", "--env=AMD_VISIBLE_DEVICES=1"]
    said = run([*words, DEBIAN, "sh", "-c", script]).ok().stdout.splitlines()
    nodes = ("/dev/dri/card1", "/dev/dri/renderD129", "/dev/kfd")
    assert said == [f"{node} {ALLOWED}" for node in nodes]

"""The driver files of Debian's packages: links through /etc/alternatives, nvidia/current."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.bundles import GpuBundle
from harness.docker import Docker, dockerd
from harness.driver import Driver, lines_of_nvidia_smi
from harness.images import image
from harness.inside import look, seen
from harness.installation import Installation, write_config
from harness.namespaces import Namespace
from harness.prefork import ONE, RUNTIMES
from harness.snapshot import nothing_left

FOLDER = "/usr/lib/x86_64-linux-gnu"
GPUS = "NVIDIA_VISIBLE_DEVICES=0,2"
ALL = "NVIDIA_DRIVER_CAPABILITIES=all"

# Libraries that need only glibc and each other. Graphics also needs libraries of X11 and GLVND.
LOADABLE = [
    "libcuda.so.1",
    "libcudadebugger.so.1",
    "libnvcuvid.so.1",
    "libnvidia-cfg.so.1",
    "libnvidia-encode.so.1",
    "libnvidia-ml.so.1",
    "libnvidia-nvvm.so.4",
    "libnvidia-opencl.so.1",
    "libnvidia-opticalflow.so.1",
    "libnvidia-ptxjitcompiler.so.1",
]
GRAPHICS = [
    "libEGL_nvidia.so.0",
    "libGLESv1_CM_nvidia.so.1",
    "libGLESv2_nvidia.so.2",
    "libGLX_nvidia.so.0",
    "libnvidia-fbc.so.1",
]


@pytest.fixture
def env(workspace: Path, real_driver: Driver, low_level: tuple[str, Namespace]) -> dict[str, str]:
    """The environment of gpu-py for the real driver files."""
    runtime, _ = low_level
    folder = workspace / "configs" / f"real-{runtime}"
    if not folder.exists():
        write_config(folder, real_driver.root, [runtime])
    return {"GPUHOOK_CONFIG": str(folder / "config.toml")}


@pytest.fixture(scope="module")
def docker(
    workspace: Path,
    host: Namespace,
    installation: Installation,
    archive: Path,
    real_driver: Driver,
) -> Iterator[Docker]:
    """A dockerd whose gpu-py uses the real driver files."""
    config = write_config(workspace / "configs" / "real-docker", real_driver.root, ["runc"])
    runtimes = {"gpu-py": installation.runtime}
    env = {"GPUHOOK_CONFIG": str(config)}
    with dockerd(workspace / "docker-real", host, runtimes, archive, env) as engine:
        yield engine


def test_driver_files_lie_where_debian_installs_them(real_driver: Driver) -> None:
    found = real_driver.library("libnvidia-ptxjitcompiler.so.1")
    assert found.parent == real_driver.root / FOLDER.strip("/") / "nvidia/current"
    assert found.stat().st_size > 1_000_000


@RUNTIMES
def test_a_container_gets_exactly_the_requested_gpus(
    bundle: GpuBundle, env: dict[str, str], real_driver: Driver
) -> None:
    bundle.environ(GPUS)
    bundle.command(*look(real_driver.minors))
    with nothing_left(pid=bundle.namespace.pid):
        inside = seen(bundle.run(bundle.gpu_py, env))
    minors = {gpu.minor for gpu in real_driver.chosen(0, 2)}
    assert inside.gpu_minors == minors
    assert inside.by_hand == {
        minor: "ENXIO" if minor in minors else "EPERM" for minor in real_driver.minors
    }


@RUNTIMES
def test_every_library_found_in_a_container_is_the_hosts(
    bundle: GpuBundle, env: dict[str, str], real_driver: Driver
) -> None:
    bundle.environ(GPUS, ALL)
    bundle.command(*look(libraries=LOADABLE))
    libraries = seen(bundle.run(bundle.gpu_py, env)).libraries
    for name in LOADABLE:
        source = real_driver.library(name)
        status = source.stat()
        assert libraries[name] == (
            f"{FOLDER}/{source.name}",
            f"{status.st_dev}:{status.st_ino}",
        )


@ONE
def test_loader_cache_names_every_library(
    bundle: GpuBundle, env: dict[str, str], real_driver: Driver
) -> None:
    bundle.environ(GPUS, ALL)
    bundle.command("/sbin/ldconfig", "-p")
    printed = bundle.run(bundle.gpu_py, env).ok().stdout
    entries = {line.split()[0]: line.split()[-1] for line in printed.splitlines()[1:]}
    for name in [*LOADABLE, *GRAPHICS]:
        assert entries[name] == f"{FOLDER}/{name}"
    versioned = [f"libnvidia-eglcore.so.{real_driver.version}"]
    assert [name for name in versioned if name not in entries] == []
    # ldconfig of newer Debian releases names the folder that /lib leads to.
    assert entries["libc.so.6"].removeprefix("/usr") == "/lib/x86_64-linux-gnu/libc.so.6"


@ONE
def test_firmware_and_programs_are_the_hosts(
    bundle: GpuBundle, env: dict[str, str], real_driver: Driver
) -> None:
    bundle.environ(GPUS, ALL)
    firmware = sorted((real_driver.root / "usr/lib/firmware/nvidia").rglob("gsp*.bin"))
    assert firmware
    names = [f"/lib/firmware/nvidia/{real_driver.version}/{path.name}" for path in firmware]
    bundle.command("busybox", "stat", "-L", "-c", "%d:%i", *names, "/usr/bin/nvidia-smi")
    lines = bundle.run(bundle.gpu_py, env).ok().stdout.splitlines()
    sources = [*firmware, real_driver.path("/usr/bin/nvidia-smi")]
    found = [source.stat() for source in sources]
    assert lines == [f"{status.st_dev}:{status.st_ino}" for status in found]


@pytest.mark.parametrize("bundle", ["debian", "lib64"], indirect=True)
@ONE
def test_the_real_nvidia_smi_shows_the_requested_gpus(
    bundle: GpuBundle, env: dict[str, str], real_driver: Driver
) -> None:
    bundle.environ(GPUS)
    bundle.command("sh", "-c", "nvidia-smi -L && gpuhook-cuda-probe")
    lines = bundle.run(bundle.gpu_py, env).ok().stdout.splitlines()
    assert lines[:2] == lines_of_nvidia_smi(real_driver.chosen(0, 2))
    assert lines[2] == "CUDA devices: 2"


@pytest.mark.parametrize("kind", ["debian", "lib64"])
def test_docker_gives_the_requested_gpus(docker: Docker, real_driver: Driver, kind: str) -> None:
    with nothing_left(pid=docker.pid):
        done = docker.run(image(kind), "nvidia-smi", "-L", env=[GPUS])
    assert done.ok().stdout.splitlines() == lines_of_nvidia_smi(real_driver.chosen(0, 2))

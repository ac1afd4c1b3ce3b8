"""A container's loader finds the driver's libraries by bare name, and they are the host's."""

import pytest
from harness.bundles import GpuBundle
from harness.driver import Driver, lines_of_nvidia_smi
from harness.inside import look, seen
from harness.prefork import ONE, RUNTIMES
from harness.snapshot import nothing_left

GLIBC_ROOTS = pytest.mark.parametrize("bundle", ["debian", "lib64"], indirect=True)
FOLDERS = {"debian": "/usr/lib/x86_64-linux-gnu", "lib64": "/usr/lib64"}


@GLIBC_ROOTS
@pytest.mark.parametrize("name", ["libcuda.so.1", "libnvidia-ml.so.1"])
@RUNTIMES
def test_loader_finds_the_hosts_library(
    request: pytest.FixtureRequest, bundle: GpuBundle, driver: Driver, name: str
) -> None:
    bundle.environ("NVIDIA_VISIBLE_DEVICES=0")
    bundle.command(*look(libraries=[name]))
    with nothing_left(driver.root, pid=bundle.namespace.pid):
        path, inode = seen(bundle.start()).libraries[name]
    source = driver.library(name)
    status = source.stat()
    assert inode == f"{status.st_dev}:{status.st_ino}"
    folder = FOLDERS[request.node.callspec.params["bundle"]]
    assert path == f"{folder}/{source.name}"


@GLIBC_ROOTS
@RUNTIMES
def test_nvidia_smi_and_a_cuda_program_see_the_chosen_gpus(
    bundle: GpuBundle, driver: Driver
) -> None:
    bundle.environ("NVIDIA_VISIBLE_DEVICES=0,2")
    bundle.command("sh", "-c", "nvidia-smi -L && gpuhook-cuda-probe")
    done = bundle.start().ok()
    lines = done.stdout.splitlines()
    assert lines[:2] == lines_of_nvidia_smi(driver.chosen(0, 2))
    assert "2" in lines[2].split(), done


@pytest.mark.parametrize(
    ("capabilities", "found", "absent"),
    [
        ("utility", ["libnvidia-ml.so.1"], ["libcuda.so.1", "libnvcuvid.so.1"]),
        ("compute", ["libcuda.so.1"], ["libnvidia-ml.so.1", "libGLX_nvidia.so.0"]),
        ("video", ["libnvcuvid.so.1", "libcuda.so.1"], ["libnvidia-ml.so.1"]),
        ("graphics", ["libGLX_nvidia.so.0", "libGLX_indirect.so.0"], ["libcuda.so.1"]),
        ("ngx", ["libnvidia-ngx.so.1"], ["libcuda.so.1"]),
        ("", ["libnvidia-ml.so.1", "libcuda.so.1"], ["libnvcuvid.so.1"]),
    ],
)
@ONE
def test_capabilities_select_the_libraries(
    bundle: GpuBundle, capabilities: str, found: list[str], absent: list[str]
) -> None:
    bundle.environ("NVIDIA_VISIBLE_DEVICES=all", f"NVIDIA_DRIVER_CAPABILITIES={capabilities}")
    bundle.command(*look(libraries=[*found, *absent]))
    libraries = seen(bundle.start()).libraries
    assert [name for name in found if libraries[name][0] == "-"] == []
    assert [name for name in absent if libraries[name][0] != "-"] == []


@RUNTIMES
def test_driver_mounts_have_restrictive_mount_options(bundle: GpuBundle, driver: Driver) -> None:
    bundle.environ("NVIDIA_VISIBLE_DEVICES=1", "NVIDIA_DRIVER_CAPABILITIES=all")
    bundle.command("cat", "/proc/self/mountinfo")
    done = bundle.start().ok()
    points = {}
    for line in done.stdout.splitlines():
        fields = line.split()
        points[fields[4]] = set(fields[5].split(","))
    library = f"/usr/lib/x86_64-linux-gnu/libcuda.so.{driver.version}"
    assert points[library] >= {"ro", "nosuid", "nodev"}
    assert points["/usr/bin/nvidia-smi"] >= {"ro", "nosuid", "nodev"}
    assert points[f"/dev/nvidia{driver.gpus[1].minor}"] >= {"ro", "nosuid", "noexec"}
    assert points["/run/nvidia-persistenced/socket"] >= {"nosuid", "nodev", "noexec"}
    firmware = [point for point in points if "/firmware/nvidia/" in point]
    assert firmware
    assert all(points[point] >= {"ro", "nosuid", "nodev"} for point in firmware)


@pytest.mark.parametrize("bundle", ["busybox"], indirect=True)
@RUNTIMES
def test_an_image_without_a_loader_gets_the_driver_files(bundle: GpuBundle, driver: Driver) -> None:
    bundle.environ("NVIDIA_VISIBLE_DEVICES=0")
    bundle.command("ls", f"/usr/lib64/libcuda.so.{driver.version}", "/usr/bin/nvidia-smi")
    bundle.start().ok()

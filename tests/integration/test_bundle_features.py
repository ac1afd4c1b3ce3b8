"""Requests for more than GPUs in real containers: MIG, IMEX, features, graphics."""

import json
import os
import stat
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from harness.bundles import Bundle, GpuBundle
from harness.commands import Result
from harness.installation import write_config
from harness.prefork import ONE, RUNTIMES

from gpuhook_simulate.vendors.nvidia import Built, Options, build

Start = Callable[..., Result]


@pytest.fixture(scope="session")
def rich(workspace: Path) -> Built:
    """A simulated machine with MIG on its second GPU, IMEX channels and GPUDirect Storage."""
    built = build(
        Options(
            root=str(workspace / "rich"),
            gpus=2,
            models=("A100",),
            minors=(1, 0),
            mig={1: ("3g.40gb", "1g.10gb")},
        )
    )
    device(built, "dev/nvidia-caps-imex-channels/channel7", os.makedev(509, 7))
    device(built, "dev/nvidia-fs0", os.makedev(510, 0))
    (Path(built.root) / "etc/cufile.json").write_text("{}")
    return built


def device(built: Built, path: str, numbers: int) -> None:
    place = Path(built.root) / path
    place.parent.mkdir(exist_ok=True)
    os.mknod(place, stat.S_IFCHR | 0o666, numbers)


@pytest.fixture
def start(bundle: GpuBundle, rich: Built, workspace: Path) -> Start:
    """A function that runs a shell script in a container of that host, with variables."""
    config = write_config(bundle.path / "config", Path(rich.root), [bundle.runtime])

    def run(script: str, **env: str) -> Result:
        bundle.environ(*(f"{name}={value}" for name, value in env.items()))
        bundle.command("sh", "-c", script)
        return bundle.start(config)

    return run


LIST_NODES = "busybox find /dev -name 'nvidia*' -type c | busybox sort"


def test_a_container_sees_only_its_mig_device(start: Start, rich: Built) -> None:
    gpu = rich.gpus[1]
    mig = gpu.migs[1]
    done = start(f"nvidia-smi -L; gpuhook-cuda-probe; {LIST_NODES}", NVIDIA_VISIBLE_DEVICES="1:1")
    text = done.ok().stdout
    assert mig.uuid in text
    assert gpu.migs[0].uuid not in text
    assert rich.gpus[0].uuid not in text
    caps = {f"/dev/nvidia-caps/nvidia-cap{cap}" for cap in (mig.gi_cap, mig.ci_cap)}
    nodes = {line for line in text.splitlines() if line.startswith("/dev/nvidia-caps/")}
    assert nodes == caps


@ONE
def test_all_includes_mig_devices(start: Start, rich: Built) -> None:
    text = start("nvidia-smi -L", NVIDIA_VISIBLE_DEVICES="all").ok().stdout
    for uuid in [rich.gpus[0].uuid, *(mig.uuid for mig in rich.gpus[1].migs)]:
        assert uuid in text


def test_an_imex_channel_can_be_opened(start: Start) -> None:
    node = "/dev/nvidia-caps-imex-channels/channel7"
    env = {"NVIDIA_VISIBLE_DEVICES": "0", "NVIDIA_IMEX_CHANNELS": "7"}
    assert start(f"devopen {node}", **env).ok().stdout == f"{node} ENXIO\n"


@ONE
def test_a_missing_imex_channel_is_an_error(start: Start) -> None:
    done = start("true", NVIDIA_VISIBLE_DEVICES="0", NVIDIA_IMEX_CHANNELS="8")
    assert done.status != 0
    assert "no IMEX channel 8" in done.stderr


@ONE
def test_gpudirect_storage_is_given_if_enabled(start: Start) -> None:
    script = "devopen /dev/nvidia-fs0; cat /etc/cufile.json"
    done = start(script, NVIDIA_VISIBLE_DEVICES="0", NVIDIA_GDS="enabled").ok()
    assert done.stdout == "/dev/nvidia-fs0 ENXIO\n{}"


@ONE
def test_gpudirect_storage_is_absent_by_default(start: Start) -> None:
    done = start("devopen /dev/nvidia-fs0; test ! -e /etc/cufile.json", NVIDIA_VISIBLE_DEVICES="0")
    assert done.ok().stdout == "/dev/nvidia-fs0 ENOENT\n"


@RUNTIMES
def test_graphics_brings_drm_nodes_links_vendor_files_and_the_profile(
    start: Start, rich: Built
) -> None:
    bus = rich.gpus[0].proc_bus_id
    script = f"""
        devopen /dev/dri/card* /dev/dri/renderD*
        devopen /dev/dri/by-path/pci-{bus}-card /dev/dri/by-path/pci-{bus}-render
        cat /etc/nvidia/nvidia-application-profiles-rc.d/10-container.conf; echo
        ls /etc/vulkan/icd.d /usr/share/glvnd/egl_vendor.d
        dlprobe libGLX_nvidia.so.0 libEGL_nvidia.so.0
    """
    env = {"NVIDIA_VISIBLE_DEVICES": "0", "NVIDIA_DRIVER_CAPABILITIES": "graphics"}
    lines = start(script, **env).ok().stdout.splitlines()
    opened = [line.split() for line in lines if line.startswith("/dev/dri")]
    assert len(opened) == 4
    assert {result for _, result in opened} <= {"ENXIO", "OK", "ENODEV"}
    assert any('"EGLVisibleDGPUDevices",0x2]' in line for line in lines)
    assert {"nvidia_icd.json", "10_nvidia.json"} <= set(lines)
    assert [line.split()[1][:9] for line in lines if line.startswith("lib")] == ["/usr/lib/"] * 2


@ONE
def test_management_of_mig_needs_privilege(start: Start) -> None:
    done = start("true", NVIDIA_VISIBLE_DEVICES="all", NVIDIA_MIG_CONFIG_DEVICES="all")
    assert done.status != 0
    assert "NVIDIA_MIG_CONFIG_DEVICES" in done.stderr


@ONE
def test_management_of_mig_opens_every_capability_except_monitor(
    bundle: Bundle, start: Start, rich: Built
) -> None:
    bundle.change(lambda spec: spec["process"]["capabilities"]["bounding"].append("CAP_SYS_ADMIN"))
    script = "devopen /dev/nvidia-caps/*"
    env = {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_MIG_CONFIG_DEVICES": "all"}
    done = start(script, **env).ok()
    results = dict(line.split() for line in done.stdout.splitlines())
    assert results.pop("/dev/nvidia-caps/nvidia-cap2") == "EPERM"  # the monitor capability
    assert set(results.values()) == {"ENXIO"}
    assert "/dev/nvidia-caps/nvidia-cap1" in results


@pytest.mark.parametrize(
    ("requirement", "met"),
    [("cuda>=11.0", True), ("cuda>=99.0", False), ("brand=tesla,driver<1 cuda>=11.0", True)],
)
@ONE
def test_an_unmet_cuda_requirement_is_refused(start: Start, requirement: str, met: bool) -> None:
    done = start("true", NVIDIA_VISIBLE_DEVICES="0", NVIDIA_REQUIRE_CUDA=requirement)
    assert (done.status == 0) is met, done
    if not met:
        assert requirement in done.stderr


COMPAT = "/usr/local/cuda/compat"
USE_COMPAT = "dlprobe libcuda.so.1; busybox cat /etc/ld.so.conf.d/00-compat-gpuhook.conf; true"


def give_compat(bundle: Bundle, rich: Built, version: str, branches: tuple[int, ...] = ()) -> None:
    """Put a CUDA compatibility library into the image, with an ELF note of driver branches."""
    library = Path(rich.root) / rich.library_dir.lstrip("/") / f"libcuda.so.{rich.driver_version}"
    if branches:
        library = with_note(library, bundle.path / "noted", branches)
    folder = f"{bundle.root}{COMPAT}"
    name = f"libcuda.so.{version}"
    script = 'mkdir -p "$1"; cp "$2" "$1/$3"; ln -s "$3" "$1/libcuda.so.1"'
    bundle.call("sh", "-ec", script, "sh", folder, library, name).ok()


def with_note(library: Path, made: Path, branches: tuple[int, ...]) -> Path:
    """Return a copy of a library with the ELF note of NVIDIA's CUDA compatibility libraries."""
    text = json.dumps({"format": 1, "CUDA version": "13.1", "driver": branches, "device": [1]})
    data = text.encode() + b"\0"
    note = made.with_suffix(".note")
    note.write_bytes(struct.pack("<III", 19, len(data), 0) + b"NVIDIA Corporation\0\0" + data)
    section = ".note.cuda.fwd_compatibility"
    subprocess.run(
        [
            "objcopy", "--add-section", f"{section}={note}", "--set-section-flags",
            f"{section}=alloc,readonly", library, made,
        ],
        check=True,
    )  # fmt: skip
    made.chmod(0o755)
    return made


@pytest.mark.parametrize(
    ("version", "noted"), [("999.1.1", False), ("999.1.1", True), ("{branch}.999.1", True)]
)
@ONE
def test_newer_cuda_libraries_of_the_image_are_used_first(
    bundle: Bundle, start: Start, rich: Built, version: str, noted: bool
) -> None:
    branch = rich.driver_version.partition(".")[0]
    version = version.format(branch=branch)
    give_compat(bundle, rich, version, (535, int(branch)) if noted else ())
    lines = start(USE_COMPAT, NVIDIA_VISIBLE_DEVICES="0").ok().stdout.splitlines()
    assert lines[0].split()[:2] == ["libcuda.so.1", f"{COMPAT}/libcuda.so.{version}"]
    assert lines[1] == COMPAT


@pytest.mark.parametrize(
    ("version", "branches"), [("400.1.1", ()), ("999.1.1", (535, 999)), ("400.1.1", (535, 400))]
)
@ONE
def test_cuda_libraries_of_the_image_that_do_not_fit_are_not_used(
    bundle: Bundle, start: Start, rich: Built, version: str, branches: tuple[int, ...]
) -> None:
    give_compat(bundle, rich, version, branches)
    lines = start(USE_COMPAT, NVIDIA_VISIBLE_DEVICES="0").ok().stdout.splitlines()
    folder = "/usr/lib/x86_64-linux-gnu"
    assert lines[0].split()[:2] == ["libcuda.so.1", f"{folder}/libcuda.so.{rich.driver_version}"]
    assert len(lines) == 1

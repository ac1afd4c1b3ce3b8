"""plan: the operations for a request, their order and their reasons."""

from typing import Any

import own
import pytest
from machines import VERSION, gpu, machine, mig, planned, read_request

from gpuhook.base.config.model import Config
from gpuhook.base.errors import UnknownDeviceError
from gpuhook.base.loader import layout
from gpuhook.core.plan.image import Image
from gpuhook.core.plan.operations import AllowDevice, Plan
from gpuhook.vendors.nvidia.cuda_compat import CudaCompat, Note
from gpuhook.vendors.nvidia.edits import COMPAT_CONFIG
from gpuhook.vendors.nvidia.model import NvidiaInventory

LIBS = own.FOLDER
MACHINE = machine(gpu(0, 3, (mig(0, 1, 12, 13), mig(1, 2, 21, 22))), gpu(1, 0))


def plan(
    what: Image | None = None,
    privileged: bool = True,
    where: NvidiaInventory | None = None,
    **env: str,
) -> Plan:
    variables = {"NVIDIA_VISIBLE_DEVICES": "1", **env}
    spec = {
        "process": {
            "env": [f"{name}={value}" for name, value in variables.items()],
            "capabilities": {"bounding": ["CAP_SYS_ADMIN"] if privileged else []},
        }
    }
    return planned(read_request(spec, Config()), where or MACHINE, what)


def found(made: Plan, kind: str) -> list[dict[str, Any]]:
    return [op.to_json() for op in made.operations if op.to_json()["kind"] == kind]


def destinations(made: Plan, kind: str) -> list[str]:
    return [op["destination"] for op in found(made, kind)]


def test_default_is_utility_and_compute_on_the_selected_gpu() -> None:
    made = plan()
    assert destinations(made, "device") == [
        "/dev/nvidiactl",
        "/dev/nvidia-uvm",
        "/dev/nvidia-uvm-tools",
        "/dev/nvidia0",
    ]
    assert made.devices == [(195, 255), (511, 0), (511, 1), (195, 0)]
    assert destinations(made, "bind") == [
        f"{LIBS}/libnvidia-ml.so.{VERSION}",
        f"{LIBS}/libcuda.so.{VERSION}",
        f"{LIBS}/libnvidia-gpucomp.so.{VERSION}",
        f"{LIBS}/libnvidia-allocator.so.{VERSION}",
        "/usr/bin/nvidia-smi",
        "/usr/bin/x",
        "/lib/firmware/nvidia/g.bin",
        "/run/p/socket",
    ]


def test_every_mount_in_a_plan_is_nosuid() -> None:
    made = plan(NVIDIA_DRIVER_CAPABILITIES="all", NVIDIA_GDS="enabled", NVIDIA_MOFED="enabled")
    mounts = [op.to_json() for op in made.operations if "options" in op.to_json()]
    assert {op["kind"] for op in mounts} >= {"bind", "device"}
    assert [op["destination"] for op in mounts if "nosuid" not in op["options"]] == []


def test_planned_links_are_ldconfigs_and_the_known_extras() -> None:
    links = [(op["destination"], op["target"]) for op in found(plan(), "symlink")]
    assert links == [
        (f"{LIBS}/libcuda.so.1", f"libcuda.so.{VERSION}"),
        (f"{LIBS}/libnvidia-allocator.so.1", f"libnvidia-allocator.so.{VERSION}"),
        (f"{LIBS}/libnvidia-ml.so.1", f"libnvidia-ml.so.{VERSION}"),
        (f"{LIBS}/libcuda.so", "libcuda.so.1"),
    ]


def test_the_cache_update_comes_last_and_the_device_rules_first() -> None:
    kinds = [op.kind for op in plan().operations]
    assert kinds[-1] == "ldcache"
    assert kinds[:4] == ["allow-device"] * 4
    assert [op.access for op in plan().operations if isinstance(op, AllowDevice)] == ["rw"] * 4


@pytest.mark.parametrize(
    ("capabilities", "present", "absent"),
    [
        ("utility", ["libnvidia-ml.so"], ["libcuda.so", "libnvidia-encode.so"]),
        ("compute", ["libcuda.so"], ["libnvidia-ml.so"]),
        ("video", ["libnvidia-encode.so", "libcuda.so"], ["libnvidia-ml.so"]),
        ("graphics", ["libGLX_nvidia.so", "libnvidia-gpucomp.so"], ["libcuda.so"]),
        ("display", ["libGLX_nvidia.so"], ["libcuda.so"]),
        ("ngx", ["libnvidia-ngx.so"], ["libcuda.so"]),
    ],
)
def test_libraries_follow_capabilities(
    capabilities: str, present: list[str], absent: list[str]
) -> None:
    made = destinations(plan(NVIDIA_DRIVER_CAPABILITIES=capabilities), "bind")
    for name in present:
        assert f"{LIBS}/{name}.{VERSION}" in made
    for name in absent:
        assert f"{LIBS}/{name}.{VERSION}" not in made


@pytest.mark.parametrize(
    ("capabilities", "nodes"),
    [
        ("utility", set()),
        ("compute", {"/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"}),
        ("video", {"/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"}),
        ("graphics", {"/dev/dri/card0", "/dev/dri/renderD128"}),
        ("display", {"/dev/nvidia-modeset", "/dev/dri/card0", "/dev/dri/renderD128"}),
    ],
)
def test_nodes_follow_capabilities(capabilities: str, nodes: set[str]) -> None:
    made = set(destinations(plan(NVIDIA_DRIVER_CAPABILITIES=capabilities), "device"))
    assert made == nodes | {"/dev/nvidiactl", "/dev/nvidia0"}


def test_32_bit_libraries_need_compat32_and_a_capability() -> None:
    made = plan(NVIDIA_DRIVER_CAPABILITIES="compute,compat32")
    folder = own.FOLDER32
    assert f"{folder}/libcuda.so.{VERSION}" in destinations(made, "bind")
    assert f"{folder}/libcuda.so.1" in destinations(made, "symlink")
    assert folder not in str(destinations(plan(), "bind"))


def test_graphics_brings_vendor_files_links_and_a_profile() -> None:
    made = plan(NVIDIA_DRIVER_CAPABILITIES="graphics")
    assert "/etc/vulkan/icd.d/nvidia_icd.json" in destinations(made, "bind")
    links = {op["destination"]: op["target"] for op in found(made, "symlink")}
    assert links["/dev/dri/by-path/pci-0000:1c:00.0-card"] == "../card0"
    assert links["/dev/dri/by-path/pci-0000:1c:00.0-render"] == "../renderD128"
    assert links[f"{LIBS}/libGLX_indirect.so.0"] == f"libGLX_nvidia.so.{VERSION}"
    (profile,) = found(made, "write")
    assert '"EGLVisibleDGPUDevices",0x1]' in profile["content"]


def test_a_file_of_two_capabilities_is_mounted_once() -> None:
    made = destinations(plan(NVIDIA_DRIVER_CAPABILITIES="compute,graphics"), "bind")
    assert len(made) == len(set(made))


def test_the_gbm_backend_needs_the_graphics_capability() -> None:
    link = f"{LIBS}/gbm/nvidia-drm_gbm.so"
    assert link not in destinations(plan(), "symlink")
    both = plan(NVIDIA_DRIVER_CAPABILITIES="compute,graphics")
    assert link in destinations(both, "symlink")


def test_devices_none_yields_driver_files_and_no_gpu() -> None:
    made = plan(NVIDIA_VISIBLE_DEVICES="none")
    assert "/dev/nvidiactl" in destinations(made, "device")
    assert not [path for path in destinations(made, "device") if path[-1].isdigit()]
    assert f"{LIBS}/libcuda.so.{VERSION}" in destinations(made, "bind")


def test_a_mig_device_adds_its_gpu_node_and_two_capability_nodes() -> None:
    made = plan(NVIDIA_VISIBLE_DEVICES="0:1", NVIDIA_DRIVER_CAPABILITIES="utility,graphics")
    assert destinations(made, "device") == [
        "/dev/nvidiactl",
        "/dev/nvidia3",
        "/dev/nvidia-caps/nvidia-cap21",
        "/dev/nvidia-caps/nvidia-cap22",
    ]
    (proc,) = found(made, "proc-driver")
    assert proc["visible"] == [
        "params",
        "version",
        "registry",
        "gpus/0000:1b:00.0",
        "capabilities/gpu3/mig/gi2/access",
        "capabilities/gpu3/mig/gi2/ci0/access",
    ]


@pytest.mark.parametrize(
    ("profile", "draws"),
    [
        ("1g.24gb+gfx", True),
        ("1g.24gb+me.gfx", True),
        ("1g.24gb+me", False),
        ("1g.24gb-gfx", False),
        ("1g.24gb", False),
    ],
)
def test_only_a_graphics_mig_device_adds_its_gpus_render_nodes(profile: str, draws: bool) -> None:
    parts = mig(0, 1, 12, 13).but(name=f"NVIDIA RTX PRO 6000 MIG {profile}"), mig(1, 2, 21, 22)
    here = machine(gpu(0, 3, parts))
    made = plan(where=here, NVIDIA_VISIBLE_DEVICES="0:0", NVIDIA_DRIVER_CAPABILITIES="graphics")
    assert ("/dev/dri/renderD131" in destinations(made, "device")) == draws
    other = plan(where=here, NVIDIA_VISIBLE_DEVICES="0:1", NVIDIA_DRIVER_CAPABILITIES="graphics")
    assert "/dev/dri/renderD131" not in destinations(other, "device")


def test_proc_shows_only_selected_gpus() -> None:
    (proc,) = found(plan(), "proc-driver")
    assert proc["visible"] == ["params", "version", "registry", "gpus/0000:1c:00.0"]


def test_mig_management_allows_mig_devices_created_later() -> None:
    made = plan(NVIDIA_VISIBLE_DEVICES="all", NVIDIA_MIG_CONFIG_DEVICES="all")
    assert {(508, n) for n in (1, 12, 13, 21, 22)} <= set(made.devices)
    assert (508, 2) not in made.devices  # the monitor capability was not asked for
    assert "/dev/nvidia-caps" in destinations(made, "bind")
    assert not [path for path in destinations(made, "device") if "nvidia-caps/" in path]
    (proc,) = found(made, "proc-driver")
    assert "capabilities/mig/config" in proc["visible"]
    assert "capabilities/gpu3" in proc["visible"]


def test_imex_channels_are_added_as_nodes_and_missing_ones_refused() -> None:
    made = plan(NVIDIA_IMEX_CHANNELS="7")
    assert "/dev/nvidia-caps-imex-channels/channel7" in destinations(made, "device")
    assert (509, 7) in made.devices
    with pytest.raises(UnknownDeviceError, match="IMEX channel 8"):
        plan(NVIDIA_IMEX_CHANNELS="8")


def test_opt_in_features_are_added_only_by_their_variable() -> None:
    assert "/dev/nvidia-fs0" not in destinations(plan(), "device")
    made = plan(NVIDIA_GDS="enabled")
    assert "/dev/nvidia-fs0" in destinations(made, "device")
    assert "/etc/cufile.json" in destinations(made, "bind")


def test_a_musl_layout_moves_the_libraries_and_needs_no_cache() -> None:
    musl = Image(layout.Layout("/usr/lib", None, uses_cache=False))
    made = plan(musl, NVIDIA_DRIVER_CAPABILITIES="compute,compat32")
    assert f"/usr/lib/libcuda.so.{VERSION}" in destinations(made, "bind")
    assert "/usr/lib/libcuda.so.1" in destinations(made, "symlink")
    assert not found(made, "ldcache")


def compat_image(version: str, note: Note | None = None) -> Image:
    names = ("libcuda.so.1", "libnvidia-nvvm.so.4")
    compat = CudaCompat("/usr/local/cuda-14.0/compat", version, note, names)
    return Image(layout.debian(own.MACHINE), {"nvidia": compat})


def test_a_newer_cuda_in_the_image_comes_first_in_the_linker_cache() -> None:
    made = plan(compat_image("600.1.1"))
    (conf,) = found(made, "write")
    assert (conf["destination"], conf["content"]) == (
        COMPAT_CONFIG,
        "/usr/local/cuda-14.0/compat\n",
    )
    (cache,) = found(made, "ldcache")
    assert cache["libraries"][:2] == ["libcuda.so.1", "libnvidia-nvvm.so.4"]
    assert "compat" not in str(destinations(made, "bind"))


@pytest.mark.parametrize("version", ["580.99.99", "570.1.1", "99.0.0", "garbage"])
def test_an_older_cuda_in_the_image_is_not_used(version: str) -> None:
    made = plan(compat_image(version))
    assert not found(made, "write")


def test_cuda_compat_libraries_are_left_out_without_compute() -> None:
    assert not found(plan(compat_image("600.1.1"), NVIDIA_DRIVER_CAPABILITIES="utility"), "write")


def test_every_operation_has_a_reason_and_a_description() -> None:
    made = plan(
        compat_image("600.1.1"),
        NVIDIA_VISIBLE_DEVICES="all",
        NVIDIA_DRIVER_CAPABILITIES="all",
        NVIDIA_GDS="enabled",
        NVIDIA_IMEX_CHANNELS="7",
    )
    assert {op.kind for op in made.operations} == {
        "allow-device", "proc-driver", "bind", "device", "symlink", "write", "ldcache",
    }  # fmt: skip
    for op in made.operations:
        assert op.reason
        assert len(op.describe()) > len(op.kind)
        assert op.to_json()["kind"] == op.kind

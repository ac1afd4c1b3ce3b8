"""Refusals of unusable requests, with the remedy, and warnings about incomplete ones."""

from collections.abc import Collection

import pytest
from machines import FILES, VERSION, asked, gpu, granted, library, machine, mig

from gpuhook.base.errors import DriverError, RequestError
from gpuhook.core.inventory.model import DriverFile
from gpuhook.vendors.nvidia import completeness
from gpuhook.vendors.nvidia.device_nodes import check_mig_management
from gpuhook.vendors.nvidia.model import NvidiaInventory
from gpuhook.vendors.nvidia.variables import CAPABILITIES, DEFAULT_CAPABILITIES

EGL_FOLDER = "/usr/share/glvnd/egl_vendor.d"
REST = (
    library(f"libnvidia-ptxjitcompiler.so.{VERSION}", "compute", "libnvidia-ptxjitcompiler.so.1"),
    library(f"libnvcuvid.so.{VERSION}", "video", "libnvcuvid.so.1"),
    library(f"libEGL_nvidia.so.{VERSION}", "graphics", "libEGL_nvidia.so.0"),
    DriverFile("manifest", "/usr/share/e.json", f"{EGL_FOLDER}/10_nvidia.json", "graphics"),
)
WHOLE = machine(gpu(0, 3, (mig(0, 1, 12, 13),)), gpu(1, 0))


def without(
    *names: str,
    root: str = "/",
    gpus: bool = True,
    compat32: bool = True,
    lost: tuple[int, ...] = (),
) -> NvidiaInventory:
    """Return a machine with a complete driver, except the nodes and files of these names."""
    files = [file for file in FILES + REST if not file.target.rpartition("/")[2].startswith(names)]
    if not compat32:
        files = [file for file in files if file.kind != "library32"]
    nodes = [node for node in WHOLE.nodes if node.path not in names]
    found = WHOLE.gpus if gpus else ()
    facts = (root, WHOLE.driver_version, WHOLE.cuda_version, found, tuple(nodes), tuple(files))
    return NvidiaInventory(*facts, lost, WHOLE.mig_minors)


def check(inventory: NvidiaInventory, capabilities: Collection[str], *selectors: str) -> None:
    wanted = tuple(sorted(capabilities))
    completeness.check(granted(asked(*selectors, capabilities=wanted), inventory))


def warnings(
    inventory: NvidiaInventory, capabilities: Collection[str], *selectors: str
) -> list[str]:
    wanted = tuple(sorted(capabilities))
    return completeness.warnings(
        granted(asked(*selectors or ["all"], capabilities=wanted), inventory)
    )


REFUSED = {
    "no uvm": (
        "/dev/nvidia-uvm",
        "compute",
        "there is no device node /dev/nvidia-uvm, without which CUDA doesn't work",
        "nvidia-modprobe -u -c=0",
    ),
    "no libcuda": (
        "libcuda.so",
        "compute",
        f"libcuda.so.{VERSION} isn't installed, without which CUDA doesn't work",
        "(libcuda1 on Debian, libnvidia-compute-580 on Ubuntu, nvidia-driver-cuda-libs on RHEL)",
    ),
    "no NVML": (
        "libnvidia-ml.so",
        "utility",
        f"libnvidia-ml.so.{VERSION} isn't installed, without which nvidia-smi doesn't work",
        f"Install the driver's libraries of exactly version {VERSION} (libnvidia-ml1 on Debian, ",
    ),
}
CASES = pytest.mark.parametrize(
    ("name", "capability", "cause", "remedy"), REFUSED.values(), ids=REFUSED
)


@CASES
@pytest.mark.parametrize("selector", ["0", "1", "0-1", "0:0", "all"])
@pytest.mark.parametrize("more", [(), ("compute", "utility"), CAPABILITIES])
def test_a_capability_that_cannot_work_is_refused_with_a_remedy(
    name: str, capability: str, cause: str, remedy: str, selector: str, more: tuple[str, ...]
) -> None:
    with pytest.raises(DriverError) as caught:
        check(without(name), {capability, *more}, selector)
    assert caught.value.code == "driver"
    assert caught.value.cause == f"The container asks for {capability}, and {cause}"
    assert remedy in caught.value.remedy
    assert caught.value.remedy.endswith(
        ", or request fewer capabilities with NVIDIA_DRIVER_CAPABILITIES"
    )


@CASES
def test_missing_files_of_unrequested_capabilities_are_not_refused(
    name: str, capability: str, cause: str, remedy: str
) -> None:
    assert cause
    assert remedy
    for other in {*CAPABILITIES, ""} - {capability}:
        check(without(name), {other}, "0")


@CASES
def test_missing_parts_without_a_requested_gpu_give_a_warning(
    name: str, capability: str, cause: str, remedy: str
) -> None:
    assert remedy
    check(without(name), {capability})  # NVIDIA_VISIBLE_DEVICES=none
    bare = without(name, gpus=False)
    check(bare, {capability}, "all")
    assert warnings(bare, {capability}) == [f"{capability} can't work: {cause}"]


def test_a_missing_node_is_named_by_its_host_path() -> None:
    with pytest.raises(DriverError, match="no device node /run/nvidia/driver/dev/nvidia-uvm, "):
        check(without("/dev/nvidia-uvm", root="/run/nvidia/driver"), DEFAULT_CAPABILITIES, "0")


def test_a_complete_driver_causes_no_error_or_warning() -> None:
    for selector in ("0", "all"):
        check(without(), CAPABILITIES, selector)
    assert warnings(without(), CAPABILITIES) == []


@pytest.mark.parametrize(
    ("name", "capabilities", "text"),
    [
        ("libnvidia-ptxjitcompiler", "compute", "compute lacks libnvidia-ptxjitcompiler"),
        ("nvidia-smi", "utility", "utility lacks nvidia-smi"),
        ("libnvcuvid", "video", "video lacks libnvcuvid"),
        ("libnvidia-encode", "video", "video lacks libnvidia-encode"),
        ("libcuda", "video", "video lacks libcuda"),
        ("/dev/nvidia-uvm", "video", "video lacks /dev/nvidia-uvm"),
        ("libGLX_nvidia", "graphics", "graphics lacks libGLX_nvidia"),
        ("libEGL_nvidia", "display", "display lacks libEGL_nvidia"),
        ("/dev/nvidia-modeset", "display", "display lacks /dev/nvidia-modeset"),
        ("libGLX", "display,graphics", "display and graphics lack libGLX_nvidia"),
        ("libnvidia-ngx", "ngx", "ngx lacks libnvidia-ngx"),
    ],
)
def test_partly_missing_capabilities_cause_a_warning(
    name: str, capabilities: str, text: str
) -> None:
    asked = capabilities.split(",")
    check(without(name), asked, "0")
    assert warnings(without(name), asked) == [text]
    assert warnings(without(name), {"ngx", "utility"} - set(asked)) == []


@pytest.mark.parametrize(
    ("file", "programs", "name", "folder"),
    [
        ("nvidia_icd.json", "Vulkan", "vulkan/icd.d/nvidia_icd.json", "vulkan"),
        ("10_nvidia.json", "EGL", "glvnd/egl_vendor.d/10_nvidia.json", "glvnd"),
    ],
)
def test_graphics_without_a_manifest_gives_a_warning(
    file: str, programs: str, name: str, folder: str
) -> None:
    check(without(file), {"graphics"}, "0")
    text = (
        f"{programs} programs don't find the driver, because there is no manifest {name}: install "
        f"it, or name the folder that has {folder} in data-search-paths"
    )
    assert warnings(without(file), {"graphics", "utility"}) == [text]
    assert warnings(without(file), {"compute", "display", "utility", "video"}) == []


def test_no_manifest_warning_is_given_when_its_library_is_missing() -> None:
    found = warnings(without("libGLX_nvidia", "nvidia_icd.json"), {"graphics"})
    assert found == ["graphics lacks libGLX_nvidia"]


def test_a_32_bit_manifest_does_not_replace_the_64_bit_one() -> None:
    file = next(each for each in FILES if each.target.endswith("nvidia_icd.json"))
    only = (*(each for each in FILES if each is not file), file.but(kind="manifest32"))
    [text] = completeness.missing_manifests(only)
    assert text.startswith("Vulkan programs")


def test_unlisted_libraries_given_with_all_capabilities_are_named() -> None:
    others = [
        library(f"libnvidia-{name}.so.{VERSION}", "all", None) for name in ("present", "new", "new")
    ]
    assert completeness.others([*FILES, *others]) == ["libnvidia-new", "libnvidia-present"]


def test_missing_32_bit_libraries_warn_only_with_compat32() -> None:
    inventory = without(compat32=False)
    assert warnings(inventory, {"compat32"}) == ["compat32 lacks every 32-bit library"]
    assert warnings(inventory, set(CAPABILITIES) - {"compat32"}) == []


def test_a_32_bit_library_does_not_replace_the_64_bit_one() -> None:
    """The host also has a 32-bit libcuda, which doesn't help a 64-bit program."""
    files = tuple(file for file in FILES if file.kind == "library32")
    assert [file.target for file in files] == [f"libcuda.so.{VERSION}"]
    assert list(completeness.missing_libraries({"compute"}, files, VERSION)) != []


def test_all_capabilities_on_a_compute_server_only_give_warnings() -> None:
    graphics = ("libGLX", "libEGL", "/dev/nvidia-modeset")
    server = without("libnvcuvid", "libnvidia-encode", "libnvidia-ngx", *graphics, compat32=False)
    check(server, CAPABILITIES, "all")
    assert warnings(server, CAPABILITIES) == [
        "video lacks libnvcuvid, libnvidia-encode",
        "display and graphics lack libGLX_nvidia, libEGL_nvidia, /dev/nvidia-modeset",
        "ngx lacks libnvidia-ngx",
        "compat32 lacks every 32-bit library",
    ]


@pytest.mark.parametrize("all_of_them", ["all", "ALL"])
def test_a_request_for_all_warns_about_lost_gpus(all_of_them: str) -> None:
    lost = ["GPU 2 has fallen off the bus (lost)"]
    assert warnings(without(lost=(2,)), DEFAULT_CAPABILITIES, all_of_them) == lost
    assert warnings(without(lost=(2,)), DEFAULT_CAPABILITIES, "0-1") == []


# Management of MIG ----------------------------------------------------------------------------


MIGS = machine(gpu(0, 3, (mig(0, 1, 12, 13), mig(1, 2, 21, 22))), gpu(1, 0))


def managed(*selectors: str, **options: str) -> None:
    check_mig_management(granted(asked(*selectors, **options), MIGS))


def test_mig_management_of_whole_gpus_is_allowed() -> None:
    managed("all", mig_config="all", mig_monitor="all")
    managed("0", mig_config="all")


@pytest.mark.parametrize("field", ["mig_config", "mig_monitor"])
def test_mig_management_of_single_mig_devices_is_refused(field: str) -> None:
    with pytest.raises(RequestError, match="managed as a whole"):
        managed("all", **{field: "mig0,mig1"})
    with pytest.raises(RequestError, match="single MIG devices"):
        managed("0:0", **{field: "all"})


def test_mig_config_all_allows_every_instance_without_adding_nodes() -> None:
    grant = granted(asked("all", mig_config="all"), MIGS)
    assert not [node for node, _ in grant.nodes if "nvidia-cap" in node.path]
    caps = {minor for major, minor in grant.rules() if major == 508}
    assert caps == {1, 12, 13, 21, 22}

"""Checks of AMD's driver for the doctor."""

from collections.abc import Callable, Iterator

from gpuhook.base.container.rootfs import Rootfs
from gpuhook.base.errors import DriverError, listed
from gpuhook.core.inventory.model import Inventory
from gpuhook.tools.doctor.case import Case, VendorChecks
from gpuhook.tools.doctor.devices import is_on_bus, missing_nodes, unusable
from gpuhook.tools.doctor.driver import discovered
from gpuhook.tools.doctor.finding import Finding, failure, ok, warning
from gpuhook.vendors.amd import names
from gpuhook.vendors.amd.vendor import GPUS, VENDOR

_GPU_CLASSES = ("0x03", "0x12")  # display controllers and processing accelerators


def amd_devices(case: Case) -> Iterator[Finding]:
    """Check the driver and its devices; a host without AMD GPUs needs no driver."""
    root = case.machine.path(VENDOR.root(case.config))
    try:
        inventory = discovered(VENDOR, case)
    except DriverError as error:
        if is_on_bus(case.machine, _is_gpu):
            yield failure("amd-driver", error.cause, error.remedy)
        return
    yield ok("amd-driver", f"AMD's driver {inventory.version} is loaded")
    yield from missing_nodes("amd-nodes", "AMD", inventory.missing())
    yield from _devices(inventory, root)
    if inventory.devices:
        yield from _groups(case, inventory)


def _is_gpu(fact: Callable[[str], str]) -> bool:
    return fact("vendor") == f"0x{names.PCI_VENDOR}" and fact("class").startswith(_GPU_CLASSES)


def _devices(inventory: Inventory, root: str) -> Iterator[Finding]:
    """Report the number of devices, and which can't be used."""
    count = len(inventory.devices)
    yield ok("amd-devices", f"Containers can have {count} AMD GPUs and partitions")
    remedy = "Delete the node, and let udev create it again"
    yield from unusable("amd-devices", names.NOUN, remedy, inventory.devices)
    with Rootfs(root) as below:
        bound = [name for name in below.list_folder(GPUS) if ":" in name]
    unknown = sorted({*bound} - {device.bus_id for device in inventory.devices})
    if unknown:
        yield warning(
            "amd-devices",
            f"KFD, the compute driver, doesn't know the GPU at {listed(unknown)}: no container "
            "can have it",
            "Look for kfd in dmesg; some GPUs are only for displays",
        )


def _groups(case: Case, inventory: Inventory) -> Iterator[Finding]:
    groups = sorted({node.group for node in inventory.nodes} - {0})
    if groups and case.config.feature("no-additional-gids-for-device-nodes"):
        numbers = " and ".join(map(str, groups))
        yield warning(
            "amd-groups",
            f"The nodes of AMD GPUs belong to the groups {numbers}, and no container's process is "
            "put in them: one that doesn't run as root finds no GPU, without an error",
            "Remove no-additional-gids-for-device-nodes from [features], or use docker run "
            "--group-add",
        )


CHECKS = VendorChecks(
    (amd_devices,),
    report_files=(
        "/sys/module/amdgpu/version",
        "/sys/class/kfd/kfd/topology/generation_id",
        "/sys/class/kfd/kfd/topology/nodes/*/properties",
        f"{GPUS}/*/current_compute_partition",
        f"{GPUS}/*/current_memory_partition",
    ),
    report_nodes=("/dev/kfd", "/dev/dri/*"),
)

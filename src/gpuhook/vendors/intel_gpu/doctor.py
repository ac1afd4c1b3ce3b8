"""What the doctor looks at of Intel's GPU driver; ``gpuhook.doctor.vendors`` says how it is used.

A machine whose GPU nobody uses, as many servers have one, is not examined.
"""

from collections.abc import Iterator

from gpuhook.container.rootfs import Rootfs
from gpuhook.doctor.case import Case
from gpuhook.doctor.finding import Finding, failure, ok, warning
from gpuhook.errors import DriverError
from gpuhook.vendors import bound
from gpuhook.vendors.intel_gpu import names
from gpuhook.vendors.intel_gpu.discover import DRIVERS, PRODUCTS
from gpuhook.vendors.intel_gpu.vendor import VENDOR

_CHECK = "intel-gpus"


def intel_gpus(case: Case) -> Iterator[Finding]:
    """Ask which GPUs there are, and whether their nodes are right."""
    try:
        inventory = VENDOR.discover(case.config)
    except DriverError as error:
        if _without_driver(case) or case.config.own_driver_root(names.NAME):
            yield failure(_CHECK, error.cause, error.remedy)
        return
    if inventory.devices:
        yield ok(_CHECK, f"Intel's driver {inventory.version} has {len(inventory.devices)} GPUs")
    if missing := inventory.missing():
        text = f"Intel's driver has no node {', '.join(missing)}"
        yield failure(_CHECK, text, "See that udev makes it, or load the driver again")
    for device in inventory.devices:
        if device.state:
            text = f"GPU {device.label} ({device.id}) can't be used: {device.state}"
            yield warning(_CHECK, text, names.LOST_REMEDY)


def _without_driver(case: Case) -> bool:
    """Tell whether there is a GPU that somebody has bought for computing."""
    folder = "/sys/bus/pci/devices"
    try:
        with Rootfs(VENDOR.root(case.config)) as root:
            return any(_is_product(root, f"{folder}/{name}") for name in root.list_folder(folder))
    except OSError:
        return False


def _is_product(root: Rootfs, folder: str) -> bool:
    vendor, device = (bound.text(root, f"{folder}/{name}")[2:] for name in ("vendor", "device"))
    return vendor == "8086" and device in PRODUCTS


DRIVER_CHECKS = (intel_gpus,)
HOST_CHECKS = ()
REPORT_FILES = tuple(
    f"{bound.driver_folder(driver)}/*/{name}"
    for driver in DRIVERS
    for name in ("device", "sriov_numvfs", "drm/*/dev")
)
REPORT_NODES = ("/dev/dri/*",)

"""Checks of Intel's GPU driver for the doctor; ``tools/doctor/vendors`` says how they are used.

A host with an unused GPU, as many servers have, is not checked.
"""

from collections.abc import Callable

from gpuhook.tools.doctor.driver import Driver
from gpuhook.vendors import sysfs_devices
from gpuhook.vendors.intel_gpu.discover import DRIVERS, PRODUCTS
from gpuhook.vendors.intel_gpu.vendor import VENDOR


def _is_product(fact: Callable[[str], str]) -> bool:
    """Tell whether a device is a GPU product for computing."""
    return fact("vendor") == "0x8086" and fact("device").removeprefix("0x") in PRODUCTS


_HAS = "Intel's driver {version} has {count} GPUs"
intel_gpus = Driver(
    "intel-gpus",
    "Intel",
    _HAS,
    VENDOR,
    lambda case, _: VENDOR.discover(case.config),
    is_ours=_is_product,
    by_root=True,
)
DRIVER_CHECKS = (intel_gpus,)
HOST_CHECKS = ()
REPORT_FILES = tuple(
    f"{sysfs_devices.driver_folder(driver)}/*/{name}"
    for driver in DRIVERS
    for name in ("device", "sriov_numvfs", "drm/*/dev")
)
REPORT_NODES = ("/dev/dri/*",)

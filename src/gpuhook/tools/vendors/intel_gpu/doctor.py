"""Checks of Intel's GPU driver for the doctor.

A host with an unused GPU, as many servers have, is not checked.
"""

from collections.abc import Callable

from gpuhook.tools.doctor.case import VendorChecks
from gpuhook.tools.doctor.driver import DriverCheck
from gpuhook.vendors import sysfs_devices
from gpuhook.vendors.intel_gpu.discover import DRIVERS, PRODUCTS
from gpuhook.vendors.intel_gpu.vendor import VENDOR


def _is_product(fact: Callable[[str], str]) -> bool:
    """Tell whether a device is a GPU product for computing."""
    return fact("vendor") == "0x8086" and fact("device").removeprefix("0x") in PRODUCTS


intel_gpus = DriverCheck(
    VENDOR, "intel-gpus", _is_product, "{title}'s driver {version} has {count} GPUs", by_root=True
)
CHECKS = VendorChecks(
    (intel_gpus,),
    report_files=tuple(
        f"{sysfs_devices.driver_folder(driver)}/*/{name}"
        for driver in DRIVERS
        for name in ("device", "sriov_numvfs", "drm/*/dev")
    ),
    report_nodes=("/dev/dri/*",),
)

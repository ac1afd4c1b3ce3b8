"""What the doctor looks at of Intel's GPU driver; ``tools/doctor/vendors`` says how it is used.

A machine whose GPU nobody uses, as many servers have one, is not examined.
"""

from collections.abc import Callable

from gpuhook.tools.doctor.driver import Driver
from gpuhook.vendors import bound
from gpuhook.vendors.intel_gpu.discover import DRIVERS, PRODUCTS
from gpuhook.vendors.intel_gpu.vendor import VENDOR


def _is_product(fact: Callable[[str], str]) -> bool:
    """Tell whether it is a GPU that somebody has bought for computing."""
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
    f"{bound.driver_folder(driver)}/*/{name}"
    for driver in DRIVERS
    for name in ("device", "sriov_numvfs", "drm/*/dev")
)
REPORT_NODES = ("/dev/dri/*",)

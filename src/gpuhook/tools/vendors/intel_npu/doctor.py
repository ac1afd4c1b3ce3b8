"""Checks of Intel's NPU driver for the doctor; ``tools/doctor/vendors`` says how they are used.

A host with an unused NPU, as many notebooks have, is not checked.
"""

from gpuhook.tools.doctor.driver import Driver
from gpuhook.vendors import sysfs_devices
from gpuhook.vendors.intel_npu.discover import DRIVER
from gpuhook.vendors.intel_npu.vendor import VENDOR

_HAS = f"The driver {DRIVER} has {{count}} NPUs"
intel_npus = Driver(
    "intel-npus",
    "Intel",
    _HAS,
    VENDOR,
    lambda case, _: VENDOR.discover(case.config),
    by_root=True,
)
DRIVER_CHECKS = (intel_npus,)
HOST_CHECKS = ()
REPORT_FILES = tuple(
    f"{sysfs_devices.driver_folder(DRIVER)}/*/{name}" for name in ("device", "accel/*/dev")
)
REPORT_NODES = ("/dev/accel/*",)

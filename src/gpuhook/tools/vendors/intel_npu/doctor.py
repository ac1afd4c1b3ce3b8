"""Checks of Intel's NPU driver for the doctor.

A host with an unused NPU, as many notebooks have, is not checked.
"""

from gpuhook.tools.doctor.case import VendorChecks
from gpuhook.tools.doctor.driver import DriverCheck
from gpuhook.vendors import sysfs_devices
from gpuhook.vendors.intel_npu.discover import DRIVER
from gpuhook.vendors.intel_npu.vendor import VENDOR

intel_npus = DriverCheck(
    VENDOR, "intel-npus", has="The driver {version} has {count} NPUs", by_root=True
)
CHECKS = VendorChecks(
    (intel_npus,),
    report_files=tuple(
        f"{sysfs_devices.driver_folder(DRIVER)}/*/{name}" for name in ("device", "accel/*/dev")
    ),
    report_nodes=("/dev/accel/*",),
)

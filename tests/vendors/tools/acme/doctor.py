"""Checks of ACME's driver."""

from gpuhook.tools.doctor.case import VendorChecks
from gpuhook.tools.doctor.driver import DriverCheck
from gpuhook.vendors.acme import names
from gpuhook.vendors.acme.vendor import CLASS, VENDOR

acme_devices = DriverCheck(
    VENDOR,
    "acme-devices",
    lambda fact: fact("vendor") == f"0x{names.PCI_VENDOR}",
    by_root=True,
    without="Look for acme in dmesg",
)
CHECKS = VendorChecks(
    (acme_devices,),
    report_files=("/sys/module/acme/version", f"{CLASS}/*/*"),
    report_nodes=("/dev/acme*",),
)

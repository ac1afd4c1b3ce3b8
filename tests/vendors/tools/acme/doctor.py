"""Checks of ACME's driver; ``tools/doctor/vendors`` describes their use."""

from collections.abc import Iterator

from gpuhook.base.errors import DriverError
from gpuhook.tools.doctor.case import Case
from gpuhook.tools.doctor.devices import missing_nodes, unusable
from gpuhook.tools.doctor.finding import Finding, failure, ok
from gpuhook.vendors.acme.vendor import VENDOR


def acme_devices(case: Case) -> Iterator[Finding]:
    """Ask whether there is a driver, and whether it can use its NPUs."""
    try:
        inventory = VENDOR.discover(case.config)
    except DriverError as error:
        yield failure("acme-devices", error.cause, error.remedy)
        return
    yield ok("acme-devices", f"ACME's driver {inventory.version} has {len(inventory.devices)}")
    yield from missing_nodes("acme-devices", "ACME", inventory.missing())
    yield from unusable("acme-devices", "NPU", VENDOR.names.LOST_REMEDY, inventory.devices)


DRIVER_CHECKS = (acme_devices,)
HOST_CHECKS = ()
REPORT_FILES = ("/sys/module/acme/version", "/sys/class/acme/*/*")
REPORT_NODES = ("/dev/acme*",)

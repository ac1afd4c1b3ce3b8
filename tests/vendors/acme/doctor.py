"""What the doctor looks at of ACME's driver; ``gpuhook.doctor.vendors`` says how it is used."""

from collections.abc import Iterator

from gpuhook.doctor.case import Case
from gpuhook.doctor.finding import Finding, failure, ok, warning
from gpuhook.errors import DriverError
from gpuhook.vendors.acme.vendor import VENDOR


def acme_devices(case: Case) -> Iterator[Finding]:
    """Ask whether there is a driver, and whether it can use its NPUs."""
    try:
        inventory = VENDOR.discover(case.config)
    except DriverError as error:
        yield failure("acme-devices", error.cause, error.remedy)
        return
    yield ok("acme-devices", f"ACME's driver {inventory.version} has {len(inventory.devices)}")
    for device in inventory.devices:
        if device.state:
            text = f"NPU {device.label} ({device.id}) can't be used: {device.state}"
            yield warning("acme-devices", text, VENDOR.names.LOST_REMEDY)


DRIVER_CHECKS = (acme_devices,)
HOST_CHECKS = ()
REPORT_FILES = ("/sys/module/acme/version", "/sys/class/acme/*/*")
REPORT_NODES = ("/dev/acme*",)

"""What the doctor looks at of Intel's NPU driver; ``gpuhook.doctor.vendors`` says how it is used.

A machine whose NPU nobody uses, as many notebooks have one, is not examined.
"""

from collections.abc import Iterator

from gpuhook.doctor.case import Case
from gpuhook.doctor.finding import Finding, failure, ok, warning
from gpuhook.errors import DriverError
from gpuhook.vendors import bound
from gpuhook.vendors.intel_npu import names
from gpuhook.vendors.intel_npu.discover import DRIVER
from gpuhook.vendors.intel_npu.vendor import VENDOR

_CHECK = "intel-npus"


def intel_npus(case: Case) -> Iterator[Finding]:
    """Ask which NPUs there are, and whether their nodes are right."""
    try:
        inventory = VENDOR.discover(case.config)
    except DriverError as error:
        if case.config.own_driver_root(names.NAME):
            yield failure(_CHECK, error.cause, error.remedy)
        return
    if inventory.devices:
        yield ok(_CHECK, f"The driver {DRIVER} has {len(inventory.devices)} NPUs")
    if missing := inventory.missing():
        text = f"The driver {DRIVER} has no node {', '.join(missing)}"
        yield failure(_CHECK, text, "See that udev makes it, or load the driver again")
    for device in inventory.devices:
        if device.state:
            text = f"NPU {device.label} can't be used: {device.state}"
            yield warning(_CHECK, text, names.LOST_REMEDY)


DRIVER_CHECKS = (intel_npus,)
HOST_CHECKS = ()
REPORT_FILES = tuple(
    f"{bound.driver_folder(DRIVER)}/*/{name}" for name in ("device", "accel/*/dev")
)
REPORT_NODES = ("/dev/accel/*",)

"""What the doctor looks at of Intel's NPU driver; ``tools/doctor/vendors`` says how it is used.

A machine whose NPU nobody uses, as many notebooks have one, is not examined.
"""

from collections.abc import Iterator

from gpuhook.ground.errors import DriverError
from gpuhook.tools.doctor.case import Case
from gpuhook.tools.doctor.devices import missing_nodes, unusable
from gpuhook.tools.doctor.finding import Finding, failure, ok
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
    yield from missing_nodes(_CHECK, "Intel", inventory.missing())
    yield from unusable(_CHECK, "NPU", names.LOST_REMEDY, inventory.devices)


DRIVER_CHECKS = (intel_npus,)
HOST_CHECKS = ()
REPORT_FILES = tuple(
    f"{bound.driver_folder(DRIVER)}/*/{name}" for name in ("device", "accel/*/dev")
)
REPORT_NODES = ("/dev/accel/*",)

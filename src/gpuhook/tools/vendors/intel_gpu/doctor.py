"""What the doctor looks at of Intel's GPU driver; ``tools/doctor/vendors`` says how it is used.

A machine whose GPU nobody uses, as many servers have one, is not examined.
"""

from collections.abc import Callable, Iterator

from gpuhook.ground.errors import DriverError
from gpuhook.tools.doctor.case import Case
from gpuhook.tools.doctor.devices import is_on_bus, missing_nodes, unusable
from gpuhook.tools.doctor.finding import Finding, failure, ok
from gpuhook.tools.doctor.machine import Machine
from gpuhook.vendors import bound
from gpuhook.vendors.intel_gpu import names
from gpuhook.vendors.intel_gpu.discover import DRIVERS, PRODUCTS
from gpuhook.vendors.intel_gpu.vendor import VENDOR

_CHECK = "intel-gpus"


def intel_gpus(case: Case) -> Iterator[Finding]:
    """Ask which GPUs there are, and whether their nodes are right."""
    try:
        inventory = VENDOR.discover(case.config)
    except DriverError as error:
        driver = Machine(VENDOR.root(case.config))
        if is_on_bus(driver, _is_product) or case.config.own_driver_root(names.NAME):
            yield failure(_CHECK, error.cause, error.remedy)
        return
    if inventory.devices:
        yield ok(_CHECK, f"Intel's driver {inventory.version} has {len(inventory.devices)} GPUs")
    yield from missing_nodes(_CHECK, "Intel", inventory.missing())
    yield from unusable(_CHECK, "GPU", names.LOST_REMEDY, inventory.devices)


def _is_product(fact: Callable[[str], str]) -> bool:
    """Tell whether it is a GPU that somebody has bought for computing."""
    return fact("vendor") == "0x8086" and fact("device").removeprefix("0x") in PRODUCTS


DRIVER_CHECKS = (intel_gpus,)
HOST_CHECKS = ()
REPORT_FILES = tuple(
    f"{bound.driver_folder(driver)}/*/{name}"
    for driver in DRIVERS
    for name in ("device", "sriov_numvfs", "drm/*/dev")
)
REPORT_NODES = ("/dev/dri/*",)

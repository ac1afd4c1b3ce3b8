"""What the doctor looks at of Gaudi's driver; ``tools/doctor/vendors`` says how it is used."""

from collections.abc import Callable, Iterator

from gpuhook.ground.errors import DriverError, listed
from gpuhook.tools.doctor.case import Case
from gpuhook.tools.doctor.devices import closed_nodes, is_on_bus, missing_nodes, unusable
from gpuhook.tools.doctor.finding import Finding, failure, note, ok, warning
from gpuhook.tools.doctor.machine import Machine
from gpuhook.vendors.gaudi.discover import MODELS, discover
from gpuhook.vendors.gaudi.model import DRIVER, Inventory, seats
from gpuhook.vendors.gaudi.names import PCI_VENDOR
from gpuhook.vendors.gaudi.vendor import VENDOR

_CHECK = "gaudi-devices"
_UDEV = "See that udev makes it for everybody, or load the driver again (modprobe habanalabs)"


def gaudi_devices(case: Case) -> Iterator[Finding]:
    """Ask whether the driver is loaded, and whether all its devices can be used.

    Nothing is said of a machine without any.
    """
    driver = Machine(case.machine.path(VENDOR.root(case.config)))
    try:
        inventory = discover(driver.path("/"))
    except DriverError as error:
        if is_on_bus(driver, _is_device) or is_on_bus(case.machine, _is_device):
            yield failure(_CHECK, error.cause, error.remedy)
        return
    if not inventory.devices:
        yield warning(_CHECK, "Intel Gaudi's driver has no device", "Look for habanalabs in dmesg")
        return
    count = len(inventory.devices)
    yield ok(_CHECK, f"Intel Gaudi's driver {inventory.version} has {count} devices")
    yield from unusable(_CHECK, "Gaudi", VENDOR.names.LOST_REMEDY, inventory.devices)
    yield from missing_nodes(_CHECK, "Intel Gaudi", inventory.missing(), _UDEV)
    yield from closed_nodes(_CHECK, inventory, _UDEV)
    yield from _programs(inventory)


def _is_device(fact: Callable[[str], str]) -> bool:
    return fact("vendor") == f"0x{PCI_VENDOR}" and fact("device").removeprefix("0x") in MODELS


def _programs(inventory: Inventory) -> Iterator[Finding]:
    """Say what programs in containers have to do without."""
    unseated = [device.label for device in inventory.devices if not seats(device)]
    if unseated:
        text = (
            f"The module id of Gaudi {listed(unseated)} isn't known, or another device has it, too"
        )
        remedy = "Ask for it by index; HABANA_VISIBLE_MODULES isn't set for it. Update the driver"
        yield warning(_CHECK, text, remedy)
    if inventory.networked:
        labels = [each.label for each in inventory.devices if each.id in inventory.networked]
        yield note(
            _CHECK,
            f"The network ports of Gaudi {listed(labels)} are moved into no container by gpuhook",
            "Where programs need them, run Habana's hook (habana-container-hook), too",
        )


DRIVER_CHECKS = (gaudi_devices,)
HOST_CHECKS = ()
REPORT_FILES = (
    "/sys/module/habanalabs/version",
    *(f"{DRIVER}/*/{name}" for name in ("status", "module_id", "device_type", "device")),
    f"{DRIVER}/*/accel/*/dev",
    f"{DRIVER}/*/infiniband_verbs/*/dev",
)
REPORT_NODES = ("/dev/accel/*", "/dev/infiniband/uverbs*")

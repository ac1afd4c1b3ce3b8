"""Checks of Gaudi's driver for the doctor."""

from collections.abc import Callable, Iterator

from gpuhook.base.errors import listed
from gpuhook.tools.doctor.case import VendorChecks
from gpuhook.tools.doctor.driver import DriverCheck
from gpuhook.tools.doctor.finding import Finding, note, warning
from gpuhook.tools.doctor.machine import Machine
from gpuhook.vendors.gaudi.discover import MODELS
from gpuhook.vendors.gaudi.names import PCI_VENDOR
from gpuhook.vendors.gaudi.vendor import DRIVER, VENDOR, GaudiInventory, seats

_CHECK = "gaudi-devices"


def _is_device(fact: Callable[[str], str]) -> bool:
    return fact("vendor") == f"0x{PCI_VENDOR}" and fact("device").removeprefix("0x") in MODELS


def _programs(_: Machine, inventory: GaudiInventory) -> Iterator[Finding]:
    """Report features that programs in containers lack."""
    unseated = [device.label for device in inventory.devices if not seats(device)]
    if unseated:
        text = (
            f"The module id of Gaudi {listed(unseated)} is unknown, or another device has it, too"
        )
        remedy = "Ask for it by index; HABANA_VISIBLE_MODULES isn't set for it. Update the driver"
        yield warning(_CHECK, text, remedy)
    if inventory.networked:
        labels = [each.label for each in inventory.devices if each.id in inventory.networked]
        yield note(
            _CHECK,
            f"The network ports of Gaudi {listed(labels)} are moved into no container by gpuhook",
            "If programs need them, run Habana's hook (habana-container-hook), too",
        )


gaudi_devices = DriverCheck(
    VENDOR,
    _CHECK,
    _is_device,
    without="Look for habanalabs in dmesg",
    udev="Check that udev's rule permits all users, or load the driver again (modprobe habanalabs)",
    is_for_everybody=True,
    more=_programs,
)
CHECKS = VendorChecks(
    (gaudi_devices,),
    report_files=(
        "/sys/module/habanalabs/version",
        *(f"{DRIVER}/*/{name}" for name in ("status", "module_id", "device_type", "device")),
        f"{DRIVER}/*/accel/*/dev",
        f"{DRIVER}/*/infiniband_verbs/*/dev",
    ),
    report_nodes=("/dev/accel/*", "/dev/infiniband/uverbs*"),
)

"""Checks that vendors share: unusable devices, device nodes, and devices on the PCI bus."""

from collections.abc import Callable, Iterator

from gpuhook.base.errors import listed
from gpuhook.core.inventory.model import EVERYBODY, Device, Inventory
from gpuhook.tools.doctor.finding import Finding, failure, warning
from gpuhook.tools.doctor.machine import Machine

# Recognises a device on the PCI bus. The argument is a function that returns an attribute of the
# device, such as its vendor, in the kernel's form (0x10de), "" if there is no such attribute.
IsOurs = Callable[[Callable[[str], str]], bool]

UDEV = "Check that udev creates it, or reload the driver"
_PCI = "/sys/bus/pci/devices"


def unusable(check: str, noun: str, remedy: str, devices: tuple[Device, ...]) -> Iterator[Finding]:
    """Warn of each unusable device, with the driver's reason."""
    for device in devices:
        if device.state:
            identity = "" if device.id == device.label else f" ({device.id})"
            text = f"{noun} {device.label}{identity} can't be used: {device.state}"
            yield warning(check, text, remedy)


def missing_nodes(
    check: str, title: str, missing: list[str], remedy: str = UDEV
) -> Iterator[Finding]:
    """Report the missing nodes of the driver's devices."""
    if missing:
        yield failure(check, f"{title}'s driver has no node {listed(missing)}", remedy)


def closed_nodes(check: str, inventory: Inventory, remedy: str) -> Iterator[Finding]:
    """Warn of nodes that not all users can open."""
    closed = [node.path for node in inventory.nodes if node.mode & EVERYBODY != EVERYBODY]
    if closed:
        text = f"Not all users can open {listed(closed)}: other users' programs see no device"
        yield warning(check, text, remedy)


def is_on_bus(machine: Machine, is_ours: IsOurs) -> bool:
    """Tell whether the PCI bus has a device of a vendor."""

    def facts(folder: str) -> Callable[[str], str]:
        return lambda name: (machine.text(f"{folder}/{name}") or "").strip()

    return any(is_ours(facts(f"{_PCI}/{name}")) for name in machine.names(_PCI))

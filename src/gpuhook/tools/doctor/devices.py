"""What the vendors' own checks have in common: devices out of order, their nodes, the PCI bus."""

from collections.abc import Callable, Iterator

from gpuhook.ground.errors import listed
from gpuhook.start.inventory.model import EVERYBODY, Device, Inventory
from gpuhook.tools.doctor.finding import Finding, failure, warning
from gpuhook.tools.doctor.machine import Machine

# Recognises a device on the PCI bus: it is given what returns a fact of it, such as its vendor, as
# the kernel has it (0x10de), "" where there is no such fact.
IsOurs = Callable[[Callable[[str], str]], bool]

UDEV = "See that udev makes it, or load the driver again"
_PCI = "/sys/bus/pci/devices"


def unusable(check: str, noun: str, remedy: str, devices: tuple[Device, ...]) -> Iterator[Finding]:
    """Warn of each device that can't be used, with the driver's reason."""
    for device in devices:
        if device.state:
            identity = "" if device.id == device.label else f" ({device.id})"
            text = f"{noun} {device.label}{identity} can't be used: {device.state}"
            yield warning(check, text, remedy)


def missing_nodes(
    check: str, title: str, missing: list[str], remedy: str = UDEV
) -> Iterator[Finding]:
    """Report the nodes that should be there, by what the driver has, and aren't."""
    if missing:
        yield failure(check, f"{title}'s driver has no node {listed(missing)}", remedy)


def closed_nodes(check: str, inventory: Inventory, remedy: str) -> Iterator[Finding]:
    """Warn of nodes that not everybody may open."""
    closed = [node.path for node in inventory.nodes if node.mode & EVERYBODY != EVERYBODY]
    if closed:
        text = f"Not everybody may open {listed(closed)}: programs of other users see no device"
        yield warning(check, text, remedy)


def is_on_bus(machine: Machine, is_ours: IsOurs) -> bool:
    """Tell whether a device on the PCI bus is one of a vendor's."""

    def facts(folder: str) -> Callable[[str], str]:
        return lambda name: (machine.text(f"{folder}/{name}") or "").strip()

    return any(is_ours(facts(f"{_PCI}/{name}")) for name in machine.names(_PCI))

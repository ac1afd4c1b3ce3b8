"""Where a PCI device is in the machine, as /sys says it: its memory's node, the root of its bus."""

import re

from gpuhook.ground.container.rootfs import Rootfs
from gpuhook.vendors import bound

_DEVICES = "/sys/bus/pci/devices"
_ROOT = re.compile(r"/sys/devices/(pci[0-9a-f]{4,}:[0-9a-f]{2})/")


def numa(root: Rootfs, bus_id: str) -> int | None:
    """Return the node of memory that a PCI device is near to, None where the kernel says none."""
    text = attribute(root, bus_id, "numa_node")
    return int(text) if text.isascii() and text.isdecimal() else None


def complex_of(root: Rootfs, bus_id: str) -> str:
    """Return the root complex that a device is below (pci0000:00), "" where that isn't known."""
    if not bound.is_address(bus_id):
        return ""
    path = f"{_DEVICES}/{bus_id}"
    try:
        if root.exists(_DEVICES):
            place = root.real_path(path)
        else:
            with Rootfs("/") as own:
                place = own.real_path(path)
    except OSError:
        return ""
    match = _ROOT.match(place)
    return match[1] if match else ""


def attribute(root: Rootfs, bus_id: str, name: str) -> str:
    """Return what a small file of a PCI device says, "" where there is none.

    A driver container's root may have no /sys; then ours is the machine's as well.
    """
    if not bound.is_address(bus_id):
        return ""
    path = f"{_DEVICES}/{bus_id}/{name}"
    if root.exists(_DEVICES):
        return bound.text(root, path)
    with Rootfs("/") as own:
        return bound.text(own, path)

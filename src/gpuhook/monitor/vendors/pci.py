"""The location of a PCI device in the host, from /sys: its NUMA node and its bus's root."""

import re

from gpuhook.base.container.rootfs import Rootfs
from gpuhook.vendors import sysfs_devices

_DEVICES = "/sys/bus/pci/devices"
_ROOT = re.compile(r"/sys/devices/(pci[0-9a-f]{4,}:[0-9a-f]{2})/")


def numa(root: Rootfs, bus_id: str) -> int | None:
    """Return the NUMA node of a PCI device, None if the kernel reports none."""
    text = attribute(root, bus_id, "numa_node")
    return int(text) if text.isascii() and text.isdecimal() else None


def complex_of(root: Rootfs, bus_id: str) -> str:
    """Return the root complex above a device (pci0000:00), "" if unknown."""
    if not sysfs_devices.is_address(bus_id):
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
    """Return the content of a small file of a PCI device, "" if there is none.

    If a driver container's root has no /sys, this process's own /sys is read.
    """
    if not sysfs_devices.is_address(bus_id):
        return ""
    path = f"{_DEVICES}/{bus_id}/{name}"
    if root.exists(_DEVICES):
        return sysfs_devices.text(root, path)
    with Rootfs("/") as own:
        return sysfs_devices.text(own, path)

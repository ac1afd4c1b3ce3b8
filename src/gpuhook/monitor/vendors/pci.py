"""The location of a PCI device in the host, from /sys: its NUMA nodes and its bus's root."""

import re

from gpuhook.base.container.rootfs import Rootfs
from gpuhook.vendors import sysfs_devices

_DEVICES = "/sys/bus/pci/devices"
_NODES = "/sys/devices/system/node"
_CPUS = "/sys/devices/system/cpu"
_FIRST_CPU = re.compile(r"[0-9]+")
_ROOT = re.compile(r"/sys/devices/(pci[0-9a-f]{4,}:[0-9a-f]{2})/")


def numa(root: Rootfs, bus_id: str) -> int | None:
    """Return the NUMA node of a PCI device, None if the kernel reports none."""
    text = attribute(root, bus_id, "numa_node")
    return int(text) if text.isascii() and text.isdecimal() else None


def numa_nodes(root: Rootfs, bus_id: str) -> tuple[int, ...]:
    """Return all NUMA nodes that are near a PCI device, its own one first; () if it has none.

    The others are the nearest ones of the same socket, where firmware divides a socket into nodes.
    A node whose socket is unknown (memory without processors) counts as near. Sources: ACPI's SLIT,
    Documentation/ABI/stable/sysfs-devices-node, KEP-6072 of Kubernetes.
    """
    own = numa(root, bus_id)
    if own is None:
        return ()
    if root.exists(_DEVICES):
        return own, *_near(root, own)
    with Rootfs("/") as host:
        return own, *_near(host, own)


def _near(root: Rootfs, own: int) -> list[int]:
    numbers = sysfs_devices.text(root, f"{_NODES}/node{own}/distance").strip().split(" ")
    if own >= len(numbers) or not all(map(_is_number, numbers)):
        return []
    others = {node: int(each) for node, each in enumerate(numbers) if node != own}
    nearest = [node for node in others if others[node] == min(others.values())]
    socket = _socket(root, own)
    return [node for node in nearest if not socket or _socket(root, node) in ("", socket)]


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal()


def _socket(root: Rootfs, node: int) -> str:
    """Return the socket of a node's first processor, "" if that is unknown."""
    cpu = _FIRST_CPU.match(sysfs_devices.text(root, f"{_NODES}/node{node}/cpulist"))
    place = f"{_CPUS}/cpu{cpu[0]}/topology/physical_package_id" if cpu else ""
    return sysfs_devices.text(root, place) if place else ""


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

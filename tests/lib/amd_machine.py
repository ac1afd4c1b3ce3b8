"""AMD machines for tests: simulated, or written file by file for a case."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import paper

from gpuhook.core.inventory.model import DeviceNode, Inventory
from gpuhook.vendors.amd import discover
from gpuhook_simulate.vendors import amd as simulate

Drm = Mapping[str, list[str]]  # a folder in sysfs -> the names in its subfolder drm
DRM, KFD = 226, 235  # majors


def simulated(root: Path, count: int, **settings: str) -> Inventory:
    """Simulate a machine in that folder and return its inventory.

    Its nodes are recorded instead of made.
    """
    return paper.simulated(simulate, discover, root, count, settings)


def write(path: Path, content: object = "") -> None:
    """Write a file of sysfs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{content}\n")


def kfd_node(root: Path, number: int | str, properties: Mapping[str, object]) -> None:
    """Write a node of KFD's topology."""
    folder = root / f"sys/class/kfd/kfd/topology/nodes/{number}"
    write(folder / "properties", "\n".join(f"{name} {value}" for name, value in properties.items()))


def fabricate(root: Path, gpus: Drm, partitions: Drm, nodes: Mapping[str, Any]) -> None:
    """Write the kernel's files about PCI devices, platform devices and KFD's nodes."""
    (root / "sys/module/amdgpu/drivers/pci:amdgpu").mkdir(parents=True)
    for parent, found in (
        ("sys/module/amdgpu/drivers/pci:amdgpu", gpus),
        ("sys/devices/platform", partitions),
    ):
        for folder, names in found.items():
            for name in names:
                minor = name.removeprefix("card").removeprefix("renderD")
                write(root / parent / folder / f"drm/{name}/dev", f"{DRM}:{minor}")
    for number, properties in nodes.items():
        kfd_node(root, number, properties)


def looked_at(root: Path) -> Inventory:
    """Return the inventory of such a folder, with all nodes, mode 0660 and group 105."""
    seen = discover.discover(str(root))
    nodes = []
    for path in seen.missing():
        name = path.rpartition("/")[2]
        minor = name.removeprefix("card").removeprefix("renderD")
        major = KFD if name == "kfd" else DRM
        nodes.append(DeviceNode(path, major, int(minor) if minor.isdecimal() else 0, 0o660, 0, 105))
    facts = (seen.vendor, seen.root, seen.version, seen.devices)
    return Inventory(*facts, (*seen.nodes, *nodes), seen.control)

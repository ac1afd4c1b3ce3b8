"""Discovery of AMD GPUs through amdgpu and KFD below a driver root, without opening a device.

A GPU is a PCI device of amdgpu. A partitioned GPU is its own first partition; the others are
platform devices, of which the kernel creates as many as there could be. A device for containers
has a render node that KFD, the kernel's compute driver, lists.
"""

import re
from collections import Counter
from typing import NamedTuple

from gpuhook.base.container.rootfs import Rootfs
from gpuhook.base.errors import NoDriverError
from gpuhook.core.inventory.model import Device, DeviceNode, Inventory
from gpuhook.vendors import sysfs_devices
from gpuhook.vendors.amd import names
from gpuhook.vendors.amd.vendor import CONTROL, GPUS, MODULE, NODES, PARTITION, PLATFORM, TOPOLOGY

_ADDRESS = re.compile(r"([0-9a-f]{4,8}):([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])")
_PARTITION = re.compile(rf"{PARTITION}[._]([0-9]+)")
_NODE = re.compile(r"(card|renderD)([0-9]+)")

_DIGITS = 20  # of a 64-bit number

Properties = dict[str, int]


class RenderDevice(NamedTuple):
    """A device with a render node, as in sysfs and KFD.

    ``folder`` has its nodes' numbers, ``gpu`` is the PCI device's folder, "" if unknown; ``nodes``
    are their names in /dev/dri.
    """

    folder: str
    gpu: str
    minor: int
    nodes: tuple[str, ...]
    properties: Properties

    @property
    def bus_id(self) -> str:
        """The PCI address of its GPU, also for a partition; "" if unknown."""
        return self.gpu.rpartition("/")[2] or bus_id(self.properties)

    @property
    def order(self) -> tuple[tuple[int, ...], int]:
        """The sort key for numbering: PCI address, then render node."""
        complete = {"domain", "location_id"} <= self.properties.keys()
        address = _ADDRESS.fullmatch(bus_id(self.properties) if complete else self.bus_id)
        return tuple(int(part, 16) for part in address.groups()) if address else (), self.minor

    @property
    def partition(self) -> int:
        """Its number among the partitions of its GPU."""
        location = self.properties.get("location_id", 0)
        return location & 7 or location >> 28  # older and newer kernels


def discover(path: str) -> Inventory:
    """Discover the devices below the driver root; DriverError if there is no driver."""
    return sysfs_devices.discover_below(names.TITLE, path, _discover)


def _discover(root: Rootfs) -> Inventory:
    if not root.exists(f"{MODULE}/drivers"):
        raise NoDriverError("AMD's driver amdgpu isn't loaded", "Run modprobe amdgpu")
    known = kfd_devices(root)
    gpus = _drm_devices(root, GPUS, _ADDRESS, known)
    places = {_slot(each.bus_id): each.folder for each in reversed(gpus)}
    for each in _drm_devices(root, PLATFORM, _PARTITION, known):
        gpu = places.get(_slot(bus_id(each.properties)), "")
        gpus.append(each._replace(gpu=gpu))
    found = sorted(gpus, key=lambda each: each.order)
    paths = [CONTROL, *(f"{NODES}/{name}" for each in found for name in each.nodes)]
    there = {node.path: node for node in sysfs_devices.nodes(root, paths)}
    devices = tuple(
        _device(root, str(number), identity, each, there)
        for number, (identity, each) in enumerate(zip(_ids(found), found, strict=True))
    )
    facts = (names.NAME, root.path, _version(root), devices)
    return Inventory(*facts, tuple(there.values()), (CONTROL,))


# Kernel interfaces ----------------------------------------------------------------------------


def kfd_devices(root: Rootfs) -> dict[int, Properties]:
    """Return KFD's properties of each device, by the minor of its render node."""
    folder = f"{TOPOLOGY}/nodes"
    numbers = sorted(int(name) for name in root.list_folder(folder) if name.isdecimal())
    found: dict[int, Properties] = {}
    for number in numbers:
        properties = parse_properties(sysfs_devices.text(root, f"{folder}/{number}/properties"))
        minor = properties.get("drm_render_minor", 0)  # 0: a processor
        if minor:
            found.setdefault(minor, properties)
    return found


def parse_properties(content: str) -> Properties:
    """Return the numbers in a node's properties: lines of a name and a number."""
    lines = [sysfs_devices.words(line) for line in content.split("\n")]
    pairs = [words for words in lines if len(words) == 2 and len(words[1]) <= _DIGITS]
    return {name: int(number) for name, number in pairs if number.isdecimal()}


def bus_id(properties: Properties) -> str:
    """Return the PCI address of a device in KFD, "" if there is none.

    ``location_id`` has the bus and the device; the rest of it is the number of a partition.
    """
    location = properties.get("location_id", 0)
    if not location:
        return ""
    bus, slot = location >> 8 & 0xFF, location >> 3 & 0x1F
    return f"{properties.get('domain', 0):04x}:{bus:02x}:{slot:02x}.0"


def partition_type(root: Rootfs, gpu: str) -> str:
    """Return a PCI device's partitioning in clusters' notation: cpx_nps4; "" without any."""
    modes = [
        sysfs_devices.text(root, f"{gpu}/current_{sort}_partition")
        for sort in ("compute", "memory")
    ]
    return "_".join(mode.lower() for mode in modes if mode)


def _drm_devices(
    root: Rootfs, parent: str, pattern: "re.Pattern[str]", known: dict[int, Properties]
) -> list[RenderDevice]:
    """Return the devices in a folder of sysfs whose render node is in KFD."""
    found = []
    for name in filter(pattern.fullmatch, root.list_folder(parent)):
        folder = f"{parent}/{name}"
        entries = [_NODE.fullmatch(entry) for entry in root.list_folder(f"{folder}/drm")]
        nodes = sorted((each[1], int(each[2]), each[0]) for each in entries if each)
        minors = [minor for sort, minor, _ in nodes if sort == "renderD" and minor in known]
        if minors:
            gpu = folder if parent == GPUS else ""
            paths = tuple(path for _, _, path in nodes)
            found.append(RenderDevice(folder, gpu, minors[0], paths, known[minors[0]]))
    return found


def _slot(address: str) -> str:
    """Return a PCI address without its function, which KFD doesn't have."""
    return address.rpartition(".")[0]


def _version(root: Rootfs) -> str:
    """Return the version of AMD's own driver, or else of the kernel that includes amdgpu."""
    own = sysfs_devices.text(root, f"{MODULE}/version")
    return own or sysfs_devices.text(root, "/proc/sys/kernel/osrelease") or "of the kernel"


# Devices --------------------------------------------------------------------------------------


def _ids(found: list[RenderDevice]) -> list[str]:
    """Return unique ids of the devices, or PCI addresses if they have none.

    If partitions share one, a number is appended.
    """
    shared = [_unique_id(each) or each.bus_id or f"renderD{each.minor}" for each in found]
    numbers = Counter((base, each.partition) for base, each in zip(shared, found, strict=True))
    twice = {base for (base, _), count in numbers.items() if count > 1}
    how_many = Counter(shared)
    return [
        base
        if how_many[base] == 1
        else f"{base}:{shared[:at].count(base) if base in twice else found[at].partition}"
        for at, base in enumerate(shared)
    ]


def _unique_id(found: RenderDevice) -> str:
    number = found.properties.get("unique_id", 0)
    return f"0x{number:x}" if number else ""


def _device(
    root: Rootfs, label: str, identity: str, found: RenderDevice, nodes: dict[str, DeviceNode]
) -> Device:
    unique = found.properties.get("unique_id", 0)
    # sysfs writes all 16 digits, KFD's users omit leading zeros.
    spellings = (f"0x{unique:x}", f"0x{unique:016x}") if unique else ()
    called = {
        "index": (label,),
        "id": tuple(dict.fromkeys((*spellings, identity))),
        "bus_id": (found.bus_id,) if found.bus_id else (),
    }
    paths = tuple(f"{NODES}/{name}" for name in found.nodes)
    state = "; ".join(filter(None, (_wrong(root, found, path, nodes) for path in paths)))
    facts = (found.bus_id, _model(root, found))
    return Device(identity, label, called, paths, *facts, state=state)


def _model(root: Rootfs, found: RenderDevice) -> str:
    """Return the product (only server GPUs have one) or the PCI id, and the partition type."""
    gpu = found.gpu
    product = sysfs_devices.text(root, f"{gpu}/product_name") if gpu else ""
    number = sysfs_devices.text(root, f"{gpu}/device").removeprefix("0x") if gpu else ""
    product = product or (f"{names.PCI_VENDOR}:{number}" if number else "")
    return " ".join(filter(None, (product, partition_type(root, gpu) if gpu else "")))


def _wrong(root: Rootfs, found: RenderDevice, path: str, nodes: dict[str, DeviceNode]) -> str:
    """Return why a node isn't the device's, "" if it is: a hand-made node may be wrong."""
    numbers = sysfs_devices.text(root, f"{found.folder}/drm/{path.rpartition('/')[2]}/dev")
    node = nodes.get(path)
    if node is None or not numbers or numbers == f"{node.major}:{node.minor}":
        return ""
    return f"{path} is another device's node ({node.major}:{node.minor}, not {numbers})"

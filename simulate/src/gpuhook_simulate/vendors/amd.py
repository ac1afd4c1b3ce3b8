"""A driver root with simulated AMD GPUs: the files of amdgpu, KFD and udev.

``SETTINGS`` are the settings, with defaults for a server's whole GPUs.
"""

from typing import NamedTuple

from gpuhook.base.errors import SimulateError, listed, shown
from gpuhook.vendors.amd import names
from gpuhook.vendors.amd.discover import bus_id
from gpuhook.vendors.amd.vendor import CONTROL, GPUS, MODULE, NODES, PARTITION, PLATFORM, TOPOLOGY
from gpuhook_simulate.majors import devices_text, free_majors, machines_devices
from gpuhook_simulate.tree import Tree

# Name -> default, description. Lists of GPUs are numbers separated by commas (0,2).
SETTINGS = {
    "split": ("", "GPUs that are partitioned"),
    "partitions": ("8", "the number of their partitions: 1, 2, 3, 4, 6 or 8"),
    "memory": ("NPS1", "their memory mode"),
    "spelling": ("_", "amdgpu_xcp_1 (_) as in AMD's own driver, amdgpu_xcp.1 (.) as in Linux"),
    "ids": ("own", "unique ids: each partition's own, that of the GPU (shared), none"),
    "model": ("", "the product's name, as reported by GPUs of servers"),
    "groups": ("44,105", "the group of the cards, and the group of render nodes and /dev/kfd"),
    "unplug": ("", "GPUs that are gone; the others keep their names"),
    "unknown": ("", "GPUs that KFD doesn't know"),
    "missing": ("", "GPUs whose nodes udev hasn't created"),
    "bmc": ("no", "yes for a management controller that has card0"),
}
MODES = {1: "SPX", 2: "DPX", 3: "TPX", 4: "QPX", 6: "CPX", 8: "CPX"}
_LISTS = ("split", "groups", "unplug", "unknown", "missing")
_WORDS = {
    "partitions": tuple(str(number) for number in MODES),
    "spelling": ("_", "."),
    "ids": ("own", "shared", "none"),
    "bmc": ("no", "yes"),
}
_PLACES = 8  # DRM devices that the driver creates for each GPU if any can be partitioned
_FIRST_RENDER = 128
_MOST = 64  # maximum of GPUs or DRM devices, limited by the minor numbers
_DEVICE = 0x74A2  # MI308X's PCI device id
_UNIQUE_ID = 0x084CAFEAE17E7600
_CPUS = 2  # CPUs, whose KFD nodes precede those of the GPUs


class GpuPartition(NamedTuple):
    """A GPU, or a partition of one; ``place`` counts all DRM devices of the driver."""

    gpu: int
    number: int
    place: int
    card: int

    @property
    def location(self) -> int:
        """KFD's location id on the PCI bus."""
        return (5 + 3 * self.gpu) << 8 | self.number

    @property
    def address(self) -> str:
        """The PCI address of the GPU."""
        return bus_id({"location_id": self.location})

    @property
    def nodes(self) -> dict[str, int]:
        """The names of its nodes in /dev/dri, and their minors."""
        render = _FIRST_RENDER + self.place
        return {f"card{self.card}": self.card, f"renderD{render}": render}


class AmdMachine:
    """The simulated machine, and the tree to which it is written."""

    def __init__(self, tree: Tree, count: int, settings: dict[str, str]) -> None:
        _check(count, settings)
        self.tree = tree
        self.said = {name: default for name, (default, _) in SETTINGS.items()} | settings
        self.lists = {name: _numbers(name, self.said[name]) for name in _LISTS}
        self.gpus = [gpu for gpu in range(count) if gpu not in self.lists["unplug"]]
        known = machines_devices()
        self.majors = free_majors(("kfd", "drm"), known)
        tree.text("proc/devices", devices_text(self.majors, known), 0o444)

    def parts(self, gpu: int) -> list[GpuPartition]:
        """Return the driver's DRM devices of a GPU, whether KFD uses all of them or not."""
        places = _PLACES if self.lists["split"] else 1
        first = 1 if self.said["bmc"] == "yes" else 0
        found = [(number, gpu * places + number) for number in range(places)]
        return [GpuPartition(gpu, number, place, place + first) for number, place in found]

    def used(self, gpu: int) -> int:
        """Return the number of those that KFD uses."""
        return int(self.said["partitions"]) if gpu in self.lists["split"] else 1

    def unique_id(self, part: GpuPartition) -> int:
        """Return KFD's unique id of a part, 0 for none."""
        own = part.number if self.said["ids"] == "own" else 0
        return 0 if self.said["ids"] == "none" else _UNIQUE_ID + 16 * part.gpu + own


def simulate(tree: Tree, count: int, settings: dict[str, str]) -> list[str]:
    """Fill the tree; return lines about the devices."""
    machine = AmdMachine(tree, count, settings)
    _make_driver(machine)
    if machine.said["bmc"] == "yes":
        _make_controller(machine)
    lines, kfd = [], _CPUS
    for gpu in machine.gpus:
        parts = machine.parts(gpu)
        _make_gpu(machine, parts[0])
        for part in parts:
            _make_drm(machine, part)
        used = parts[: machine.used(gpu)]
        for part in used if gpu not in machine.lists["unknown"] else ():
            _make_kfd(machine, part, kfd)
            kfd += 1
        nodes = ", ".join(name for part in used for name in part.nodes)
        lines.append(f"GPU {gpu} at {parts[0].address}: {nodes}")
    return lines


def _check(count: int, settings: dict[str, str]) -> None:
    """Raise SimulateError for settings that can't be simulated."""
    for name, value in settings.items():
        if name not in SETTINGS:
            raise SimulateError(
                f"AMD's simulator has no setting {shown(name)}",
                f"Use some of {listed([*SETTINGS], 20)}",
            )
        if value not in _WORDS.get(name, (value,)):
            raise _unusable(name, value)
    most = _MOST // _PLACES if settings.get("split") else _MOST
    if count > most:
        raise SimulateError(
            f"{count} AMD GPUs can't be simulated: there aren't enough minor numbers",
            f"Give {most} or fewer",
        )


def _numbers(name: str, value: str) -> list[int]:
    try:
        found = [int(word) for word in value.split(",") if word.strip()]
    except ValueError:
        raise _unusable(name, value) from None
    if name == "groups" and not found:
        raise _unusable(name, value)
    return found


def _unusable(name: str, value: str) -> SimulateError:
    return SimulateError(
        f"{name}={shown(value)} can't be simulated", f"The setting is: {SETTINGS[name][1]}"
    )


def _make_driver(machine: AmdMachine) -> None:
    tree = machine.tree
    tree.text(f"{MODULE}/version", "6.12.12\n", 0o444)
    tree.folder("sys/bus/pci/drivers/amdgpu")
    tree.link(GPUS, "../../../bus/pci/drivers/amdgpu")
    tree.folder(PLATFORM)
    tree.folder("sys/devices/virtual/kfd/kfd/topology/nodes")
    tree.link("sys/class/kfd/kfd", "../../devices/virtual/kfd/kfd")
    tree.text(f"{TOPOLOGY}/generation_id", "2\n", 0o444)
    for node in range(_CPUS):
        properties = {"cpu_cores_count": 96, "simd_count": 0, "drm_render_minor": 0}
        _write_node(tree, node, 0, properties)
    tree.node(CONTROL, machine.majors["kfd"], 0, 0o660, machine.lists["groups"][-1])


def _make_controller(machine: AmdMachine) -> None:
    """Create the display of a management controller, which is another driver's card0."""
    tree = machine.tree
    folder = "sys/devices/pci0000:00/0000:02:00.0"
    for name, value in {"vendor": "0x1a03", "device": "0x2000", "class": "0x030000"}.items():
        tree.text(f"{folder}/{name}", f"{value}\n", 0o444)
    tree.text(f"{folder}/drm/card0/dev", f"{machine.majors['drm']}:0\n", 0o444)
    tree.link("sys/bus/pci/drivers/ast/0000:02:00.0", "../../../../devices/pci0000:00/0000:02:00.0")
    tree.node(f"{NODES}/card0", machine.majors["drm"], 0, 0o660, machine.lists["groups"][0])


def _make_gpu(machine: AmdMachine, part: GpuPartition) -> None:
    """Create a GPU's PCI device."""
    tree = machine.tree
    device = f"devices/pci0000:00/{part.address}"
    tree.link(f"sys/bus/pci/devices/{part.address}", f"../../../{device}")
    tree.link(f"sys/bus/pci/drivers/amdgpu/{part.address}", f"../../../../{device}")
    tree.link(f"sys/{device}/driver", "../../../bus/pci/drivers/amdgpu")
    values = {
        "vendor": f"0x{names.PCI_VENDOR}",
        "device": f"0x{_DEVICE:04x}",
        "class": "0x120000",
        "product_name": machine.said["model"],
        "current_compute_partition": MODES[machine.used(part.gpu)],
        "current_memory_partition": machine.said["memory"],
        "unique_id": f"{_UNIQUE_ID + 16 * part.gpu:016x}",
        # Values of an idle GPU.
        "gpu_busy_percent": 0,
        "mem_info_vram_total": 192 << 30,
        "mem_info_vram_used": 285 << 20,
        "hwmon/hwmon0/temp1_input": 38000,
        "hwmon/hwmon0/power1_average": 140000000,
    }
    for name, value in values.items():
        tree.text(f"sys/{device}/{name}", f"{value}\n", 0o444)


def _make_drm(machine: AmdMachine, part: GpuPartition) -> None:
    """Create the card and the render node of a GPU or a partition."""
    tree = machine.tree
    if part.number:
        beyond = part.gpu * (_PLACES - 1) + part.number - 1
        folder = f"{PLATFORM}/{PARTITION}{machine.said['spelling']}{beyond}"
    else:
        folder = f"sys/devices/pci0000:00/{part.address}"
    missing = part.gpu in machine.lists["missing"]
    groups = machine.lists["groups"]
    for (name, minor), gid in zip(part.nodes.items(), (groups[0], groups[-1]), strict=True):
        tree.text(f"{folder}/drm/{name}/dev", f"{machine.majors['drm']}:{minor}\n", 0o444)
        if not missing:
            tree.node(f"{NODES}/{name}", machine.majors["drm"], minor, 0o660, gid)


def _make_kfd(machine: AmdMachine, part: GpuPartition, node: int) -> None:
    properties = {
        "cpu_cores_count": 0,
        "simd_count": 320 // machine.used(part.gpu),
        "gfx_target_version": 90402,
        "vendor_id": int(names.PCI_VENDOR, 16),
        "device_id": _DEVICE,
        "location_id": part.location,
        "domain": 0,
        "drm_render_minor": _FIRST_RENDER + part.place,
        "unique_id": machine.unique_id(part),
    }
    _write_node(machine.tree, node, 1000 + part.place, properties)


def _write_node(tree: Tree, node: int, gpu_id: int, properties: dict[str, int]) -> None:
    folder = f"{TOPOLOGY}/nodes/{node}"
    content = "".join(f"{name} {value}\n" for name, value in properties.items())
    tree.text(f"{folder}/properties", content, 0o444)
    tree.text(f"{folder}/gpu_id", f"{gpu_id}\n", 0o444)

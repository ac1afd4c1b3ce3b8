"""A driver root with simulated Intel GPUs: only the files that discover reads.

Settings: ``driver`` (i915 or xe), ``cards`` the number of the first card (1 if a board's own
graphics is card0), ``vfs`` the number of virtual functions of the last GPU, ``no-render`` GPUs
without a render node (0,2), ``no-node`` GPUs of the driver without nodes, ``vm`` the number of
further GPUs bound to a driver for virtual machines, ``video`` and ``render`` the nodes' groups.
"""

from gpuhook.base.errors import SimulateError, shown
from gpuhook.vendors.intel_gpu.discover import DRIVERS
from gpuhook_simulate.majors import devices_text, free_majors, machines_devices
from gpuhook_simulate.settings import checked
from gpuhook_simulate.tree import Tree

SETTINGS = {
    "driver": "i915", "cards": "0", "vfs": "0", "no-render": "", "no-node": "", "vm": "0",
    "video": "44", "render": "106",
}  # fmt: skip
_FIRST_RENDER = 128


class _Machine:
    def __init__(self, tree: Tree, settings: dict[str, str]) -> None:
        known = machines_devices()
        majors = free_majors(("drm",), known)
        tree.text("proc/devices", devices_text(majors, known), 0o444)
        self.major = majors["drm"]
        self.tree = tree
        self.settings = settings
        self.cards = 0
        self.lines: list[str] = []

    def add(self, position: int, name: str, physical: str = "", driver: str = "") -> str:
        """Add a PCI device; return its address."""
        function = name.count(".") and int(name.partition(".")[2]) + 1
        address = f"0000:{position + 3:02x}:00.{function}"
        folder = f"sys/devices/pci0000:00/{address}"
        facts = {"vendor": "0x8086", "device": "0x56c0", "class": "0x038000"}
        if not physical:
            facts |= {"hwmon/hwmon0/temp2_input": "41000", "hwmon/hwmon0/energy1_input": "90000000"}
        for key, value in facts.items():
            self.tree.text(f"{folder}/{key}", f"{value}\n", 0o444)
        driver = driver or self.settings["driver"]
        self.tree.link(f"{folder}/driver", f"../../../bus/pci/drivers/{driver}")
        self.tree.link(
            f"sys/bus/pci/drivers/{driver}/{address}", f"../../../../devices/pci0000:00/{address}"
        )
        self.tree.link(f"sys/bus/pci/devices/{address}", f"../../../devices/pci0000:00/{address}")
        if physical:
            self.tree.link(f"{folder}/physfn", f"../{physical}")
        if driver in DRIVERS:
            self._nodes(folder, name, address)
        return address

    def _nodes(self, folder: str, name: str, address: str) -> None:
        number = self.cards + int(self.settings["cards"])
        self.cards += 1
        nodes = [(f"card{number}", number, int(self.settings["video"]))]
        if name not in self.settings["no-render"].split(","):
            minor = _FIRST_RENDER + number
            nodes.append((f"renderD{minor}", minor, int(self.settings["render"])))
        for node, minor, gid in nodes:
            self.tree.text(f"{folder}/drm/{node}/dev", f"{self.major}:{minor}\n", 0o444)
            if name not in self.settings["no-node"].split(","):
                self.tree.node(f"dev/dri/{node}", self.major, minor, 0o660, gid)
        self.lines.append(f"GPU {name}: card{number} at {address}")


def simulate(tree: Tree, count: int, settings: dict[str, str]) -> list[str]:
    """Fill the tree; return lines about the devices."""
    settings = checked(settings, SETTINGS, "Intel's simulator")
    if settings["driver"] not in DRIVERS:
        raise SimulateError(
            f"{shown(settings['driver'])} isn't a driver of Intel GPUs",
            f"Use {' or '.join(DRIVERS)}",
        )
    machine = _Machine(tree, settings)
    tree.text(f"sys/bus/pci/drivers/{settings['driver']}/bind", "", 0o200)
    for index in range(count):
        address = machine.add(index, str(index))
    for number in range(int(settings["vfs"]) if count else 0):
        machine.add(count - 1, f"{count - 1}.{number}", address)
    for number in range(int(settings["vm"])):
        machine.add(count + number, "", driver="vfio-pci")
    return machine.lines

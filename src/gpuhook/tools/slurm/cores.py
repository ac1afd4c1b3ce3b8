"""Which of Slurm's cores are near a device.

Slurm counts cores as hwloc does, socket by socket ("Core L#" of ``lstopo -l``), and the kernel
counts hardware threads in an order of the firmware's. Sources: gres.conf(5), and the kernel's
Documentation/ABI/stable/sysfs-devices-system-cpu.
"""

import os

from gpuhook.ground.host import files
from gpuhook.tools.slurm.gres import ranges

SYS = "/sys"
_SMALL = 1 << 16  # bytes
_MOST = 1 << 16  # CPUs of a machine


class Cores:
    """The cores of a machine, below its /sys."""

    def __init__(self, sys: str = SYS) -> None:
        self._sys = sys
        self._numbers = self._numbered()

    def near(self, bus_id: str, roots: tuple[str, ...] = ()) -> str:
        """Return the cores near a PCI device as Slurm writes them.

        "" where all are near, or which are isn't known. ``roots`` are other folders with a /sys
        that may have the device.
        """
        cpus = self._local_cpus(bus_id, roots) if bus_id else set()
        cores = {self._numbers[cpu] for cpu in cpus if cpu in self._numbers}
        return ranges([*cores]) if cores != {*self._numbers.values()} else ""

    def _local_cpus(self, bus_id: str, roots: tuple[str, ...]) -> set[int]:
        for sys in (self._sys, *(f"{root.rstrip('/')}{SYS}" for root in roots)):
            folder = f"{sys}/bus/pci/devices/{bus_id}"
            cpus = parse(_read(f"{folder}/local_cpulist"))
            if cpus:
                return cpus
            node = _read(f"{folder}/numa_node")
            if node.isdecimal():
                return parse(_read(f"{self._sys}/devices/system/node/node{node}/cpulist"))
        return set()

    def _numbered(self) -> dict[int, int]:
        """Return the core of each CPU: by socket, memory node and cache, each by its first CPU."""
        online = parse(_read(f"{self._sys}/devices/system/cpu/online"))
        nodes = [
            parse(_read(f"{self._sys}/devices/system/node/node{node}/cpulist"))
            for node in parse(_read(f"{self._sys}/devices/system/node/online"))
        ]
        keys = {}
        for cpu in online:
            folder = f"{self._sys}/devices/system/cpu/cpu{cpu}"
            shared = (
                parse(_read(f"{folder}/topology/package_cpus_list")),
                next((node for node in nodes if cpu in node), set()),
                parse(_read(f"{folder}/cache/index3/shared_cpu_list")),
                parse(_read(f"{folder}/topology/core_cpus_list")) or {cpu},
            )
            keys[cpu] = tuple(min(cpus & online, default=0) for cpus in shared)
        order = {key: number for number, key in enumerate(sorted(set(keys.values())))}
        return {cpu: order[key] for cpu, key in keys.items()}


def parse(text: str) -> set[int]:
    """Return the numbers of a list such as 0-3,8; none of what is no list, or one too long."""
    found: set[int] = set()
    for part in text.split(",") if text else ():
        first, dash, last = part.partition("-")
        ends = (first, last) if dash else (first, first)
        if not all(end.isascii() and end.isdecimal() and len(end) < 7 for end in ends):
            return set()
        found.update(range(int(ends[0]), min(int(ends[1]), _MOST) + 1))
    return found


def _read(path: str) -> str:
    try:
        return os.fsdecode(files.read_start(path, _SMALL)).strip()
    except OSError:
        return ""

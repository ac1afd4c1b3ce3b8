"""The cores near a device, by Slurm's numbers.

Slurm numbers cores as hwloc does, socket by socket ("Core L#" of ``lstopo -l``), and the kernel
numbers hardware threads in the firmware's order. Sources: gres.conf(5), and the kernel's
Documentation/ABI/stable/sysfs-devices-system-cpu.
"""

import os

from gpuhook.base.host import files
from gpuhook.hpc.slurm.gres import ranges

SYS = "/sys"
_SMALL = 1 << 16  # bytes
_MOST = 1 << 16  # CPUs of a host


class Cores:
    """The cores of a host, from its /sys."""

    def __init__(self, sys: str = SYS) -> None:
        self._sys = sys
        self._numbers = self._numbered()

    def near(self, bus_id: str, roots: tuple[str, ...] = ()) -> str:
        """Return the cores near a PCI device in Slurm's format.

        "" if all are near, or if that is unknown. ``roots`` are other folders with a /sys that may
        have the device.
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
        """Return each CPU's core, numbered by socket, NUMA node and cache, by their first CPUs."""
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
    """Return the numbers of a list such as 0-3,8; none for an invalid or too long one."""
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

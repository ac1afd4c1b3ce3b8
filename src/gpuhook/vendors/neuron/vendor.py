"""The vendor AWS Neuron: devices that are neighbours, and their cores.

The runtime in a container opens all devices between its first and its last one, so they must be
neighbours. It numbers cores over the whole host, in a container too: with 4 cores each, device 12
has the cores 48 to 51. So devices keep their numbers. The application itself selects its cores
(NEURON_RT_VISIBLE_CORES); gpuhook only compares them with the devices.
"""

from gpuhook.base.errors import RequestError, listed
from gpuhook.base.oci.jsontext import Record
from gpuhook.core.contract import Vendor
from gpuhook.core.inventory import fingerprint, model
from gpuhook.vendors.neuron import names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Any

    from gpuhook.base.config.model import Config
    from gpuhook.core.contract import Grant
    from gpuhook.core.request.reader import RequestReader

CLASS = "/sys/class/neuron_device"  # of the driver: a folder for each device, and other things
SERIAL = "info/serial_number"  # in a device's folder
CORES = "NEURON_RT_VISIBLE_CORES"
_MOST_CORES = 1 << 12  # more than any host has
_JOINED = 8  # cores of a device from which on an application may use them in pairs


class NeuronInventory(model.Inventory):
    """Inventory of Neuron devices; ``cores`` are those of each device, 0 if unknown."""

    cores: tuple[int, ...] = ()

    def table(self) -> "tuple[tuple[str, ...], list[tuple[object, ...]]]":
        """Return the devices as a table for display; no file has their bus addresses."""
        rows: list[tuple[object, ...]] = [
            (device.label, device.model, cores or "-", device.id, device.state or "-")
            for device, cores in zip(self.devices, self.cores, strict=True)
        ]
        return ("INDEX", "NAME", "CORES", "SERIAL", "STATE"), rows


class NeuronOptions(Record):
    """A container's request other than devices: the cores that its application uses.

    () for all cores, and for an unreadable value, which is left to the application.
    """

    cores: tuple[int, ...] = ()

    def facts(self) -> list[tuple[str, str]]:
        """Return facts for display, each with its title."""
        return [("Cores", ranges(self.cores) or "those of its devices")]


class Neuron(Vendor):
    """Neuron devices, from the driver's folder for each."""

    names = names
    inventory = NeuronInventory
    only_neighbours = True

    def driver_markers(self) -> "Sequence[str]":
        return (CLASS,)

    def cache_key(self, config: "Config") -> "list[Any]":
        folder = self.root(config).rstrip("/") + CLASS
        # After the driver was loaded again, a number may mean another device.
        return [
            [name, *(fingerprint.text(f"{folder}/{name}/{file}") for file in ("dev", SERIAL))]
            for name in fingerprint.names(folder)
        ]

    def options(self) -> NeuronOptions:
        return NeuronOptions()

    def read(self, reading: "RequestReader", options: "Any") -> None:
        options.cores = core_list(reading.env.get(CORES, ""))

    def check(self, grant: "Grant") -> None:
        mine = [int(device.label) for device in grant.devices]
        absent = between(mine)
        if not absent:
            return
        every = grant.inventory.devices
        usable = [int(device.label) for device in every if not device.state]
        whole = range(min(mine), max(mine) + 1)
        all_there = set(whole) <= set(usable)
        instead = ranges(whole) if all_there else f"one run of {ranges(usable)}"
        raise RequestError(
            f"The Neuron devices {ranges(mine)} aren't neighbours: Neuron's runtime opens all from "
            f"the first to the last, and fails without {ranges(absent)}",
            f"Request {instead}, or use a container for each run of neighbours",
        )

    def warnings(self, grant: "Grant") -> list[str]:
        asked, counts = grant.request.options.cores, set(_cores_of(grant))
        size = min(counts) if len(counts) == 1 else 0
        if not asked or not size:
            return []
        mine = [int(device.label) for device in grant.devices]
        known = [cores(mine, each) for each in core_sizes(size)]
        if any(set(asked) <= set(each) for each in known):
            return []
        have = " or ".join(ranges(each) for each in known)
        text = f"{CORES} names cores that its devices don't have: cores are counted over"
        return [f"{text} the whole host, and these have {have}"]


def _cores_of(grant: "Grant") -> list[int]:
    """Return how many cores each device of a grant has, 0 if unknown."""
    inventory = grant.inventory
    counts = dict(zip((each.id for each in inventory.devices), inventory.cores, strict=True))
    return [counts[name] for name in grant.ids]


# Numbers -------------------------------------------------------------------------------------


def between(numbers: "Iterable[int]") -> list[int]:
    """Return the numbers that are missing between the first and the last: none for neighbours."""
    have = sorted(set(numbers))
    return [each for each in range(have[0], have[-1]) if each not in have] if have else []


def cores(devices: "Iterable[int]", each: int) -> list[int]:
    """Return the cores of some devices of a host whose devices have ``each`` cores."""
    return [device * each + core for device in sorted(devices) for core in range(each)]


def core_sizes(count: int) -> tuple[int, ...]:
    """Return how many cores a device may have for an application: all, or joined in pairs."""
    return (count, count // 2) if count >= _JOINED else (count,)


def core_list(text: str) -> tuple[int, ...]:
    """Return the cores in NEURON_RT_VISIBLE_CORES (3, 0-3, 0,2-3), sorted, without duplicates.

    () for an invalid list.
    """
    found = bytearray(_MOST_CORES)  # by number, whether it is in the list
    for part in text.split(","):
        first, dash, last = (word.strip() for word in part.partition("-"))
        start, end = _number(first), _number(last) if dash else _number(first)
        if start is None or end is None:
            return ()
        if start <= end:
            found[start : end + 1] = bytes([1]) * (end + 1 - start)
    return tuple(number for number, is_named in enumerate(found) if is_named)


def _number(text: str) -> int | None:
    if not (text.isascii() and text.isdecimal() and len(text) < len(str(_MOST_CORES)) + 1):
        return None
    number = int(text)
    return number if number < _MOST_CORES else None


def ranges(numbers: "Iterable[int]") -> str:
    """Return numbers in their own syntax, with ranges: 0, 2-5."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return listed([str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs])


VENDOR = Neuron()

"""Choice of devices for a container that asks for any: those that the fewest containers have.

The records of running containers are counted and the choice is written under one lock
(``leases.lock``). The choice is a record of the process that starts the container, which lives
until the container has its own. The file ``choices`` has the last choices, so that a container
that is started again gets its devices again, unless others are freer by then.
"""

import os

from gpuhook.base.errors import HeldError, RequestError, UnknownDeviceError, listed, shown
from gpuhook.base.oci import jsontext
from gpuhook.base.oci.spec import ContainerState
from gpuhook.base.state_directory import boot_id
from gpuhook.core import contract
from gpuhook.core.inventory import fingerprint, nearness
from gpuhook.core.records import leases, records
from gpuhook.core.request.sources import ANY, is_any

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import ModuleType
    from typing import Any

    from gpuhook.base.config.model import Config
    from gpuhook.base.state_directory import StateDirectory
    from gpuhook.core.contract import Vendor
    from gpuhook.core.inventory.model import Device, Inventory
    from gpuhook.core.request.reader import Request

    Records = list[dict[str, Any]]

CHOICES = "choices"  # in the folder of the records
_REMEMBERED = 500  # last choices
_MOST_BYTES = 1 << 20  # of that file; a longer one is replaced
_LONGEST = 1 << 10  # characters of a bundle's path whose choice is remembered
_DIGITS = 4  # more than any host has devices
_MOST_HOLDERS = 4
_PODS = ("kubernetes", "cri-o")
_NUMA = 100  # the score of one NUMA node: more than a path in the PCI tree has folders
_PCI = "/sys/bus/pci/devices"


class ChoiceContext:
    """The start of a container, as far as a choice of free devices depends on it.

    ``process`` starts the container, and lives until its hooks have run; 0 if nothing is started.
    ``container`` is its id, ``path`` that of its config.json; "" if unknown. ``former`` are nodes
    that were chosen for its last start, and now weren't.
    """

    __slots__ = ("_path", "annotations", "container", "former", "process")

    def __init__(self, spec: "dict[str, Any]", process: int, container: str, path: str) -> None:
        self.process = process
        self.container = container
        annotations = spec.get("annotations")
        self.annotations = annotations if isinstance(annotations, dict) else {}
        self.former: set[tuple[int, int]] = set()
        self._path = path

    @property
    def bundle(self) -> str:
        """The bundle, "" if unknown; runtimes and engines may call it by different paths."""
        return os.path.realpath(os.path.dirname(self._path)) if self._path else ""

    def owns(self, record: "dict[str, Any]") -> bool:
        """Tell whether a record is of this container."""
        if not self.container or record["id"] != self.container:
            return False
        bundle = self.bundle
        return not bundle or os.path.realpath(record["bundle"]) == bundle


def count(words: "Sequence[str]", names: "ModuleType") -> int:
    """Return how many devices of a vendor are asked for by ``any``; RequestError if unclear.

    ``words`` are all names of the vendor's devices in the container's request.
    """
    word = next(each.lower() for each in words if is_any(each))
    others = [each for each in words if each.lower() != word]
    if others:
        raise RequestError(
            f"The container asks for {shown(word)} and for {shown(others[0])} of {names.TITLE}'s "
            f"devices, and {ANY} can't be combined with other names",
            f"Ask for {ANY}:N to have N devices, or name each device",
        )
    _, colon, number = word.partition(":")
    if not colon:
        return 1
    plain = number.isascii() and number.isdecimal() and len(number) <= _DIGITS
    if not plain or number[0] == "0":
        raise RequestError(
            f"{shown(word)} isn't a number of devices",
            f"Ask for {ANY}, or {ANY}:2 for two; none gives the driver without a device",
        )
    return int(number)


def choose(
    vendor: "Vendor",
    request: "Request",
    wanted: int,
    inventory: "Inventory",
    config: "Config",
    start: ChoiceContext,
) -> "tuple[Device, ...]":
    """Return ``wanted`` devices for a container, and write the choice down.

    Without a process in ``start``, nothing is written. HeldError if too few are free,
    UnknownDeviceError if the host has too few.
    """
    _refuse_pod(start)
    turn = _Choice(vendor, request, wanted, inventory, config, start)
    folder = records.open_records(config.state_dir, make=start.process > 0)
    if folder is None:
        if start.process > 0:
            raise _unknown("the folder of the records can't be used")
        return turn.chosen([], [])
    try:
        with folder:
            if start.process <= 0:
                return turn.chosen(records.read_folder(folder, []), _remembered(folder))
            with leases.lock(folder):  # protects: choice-lock
                return turn.take(folder)
    except OSError as error:
        raise _unknown(str(error.strerror)) from None


def _refuse_pod(start: ChoiceContext) -> None:
    """Refuse a container of a pod: the kubelet allocates its devices."""
    if records.engine_of(start.bundle, start.annotations) in _PODS:  # protects: choice-pod
        raise RequestError(
            f"The container asks for {ANY} device, and it is in a pod, whose devices the kubelet "
            "allocates",
            "Request devices in the pod's resources or by a claim",
        )


def _unknown(why: str) -> HeldError:
    return HeldError(
        f"Which devices are free can't be known, and the choice for {ANY} not be recorded: {why}",
        "Set state-dir in [gpuhook] to a folder that only the user who runs gpuhook can use",
    )


class _Choice:
    """One choice for one container."""

    def __init__(
        self,
        vendor: "Vendor",
        request: "Request",
        wanted: int,
        inventory: "Inventory",
        config: "Config",
        start: ChoiceContext,
    ) -> None:
        self._vendor = vendor
        self._request = request
        self._wanted = wanted
        self._inventory = inventory
        self._start = start
        self._is_exclusive = vendor.names.KIND in config.exclusive

    def take(self, folder: "StateDirectory") -> "tuple[Device, ...]":
        """Choose, with the records' folder locked, and write the choice."""
        every = records.read_folder(folder, None if self._is_exclusive else [])
        before = _remembered(folder)
        devices = self.chosen(every, before)
        if self._already(every) is None:
            self._write(folder, devices)
            _remember(folder, before, self._start, self._vendor.names, devices)
            self._drop_former(devices, before)
        return devices

    def _drop_former(self, devices: "tuple[Device, ...]", before: "Any") -> None:
        """Note the nodes of the last start's devices that the container doesn't get any more.

        A bundle that is used again still has them in its config.json.
        """
        numbers = {node.path: node.numbers for node in self._inventory.nodes}
        for device in self._remembered(before):
            if device not in devices:  # protects: choice-former
                paths = self._inventory.nodes_of(device)
                self._start.former.update(numbers[path] for path in paths if path in numbers)

    def chosen(self, every: "Records", before: "Any") -> "tuple[Device, ...]":
        """Return the best devices: the container's own, those of its last start, or others.

        ``every`` are all records, ``before`` the remembered choices.
        """
        own = self._already(every)
        if own is not None:
            return own
        others = [each for each in every if not self._start.owns(each)]
        candidates = _separate(self._vendor, self._inventory)
        if len(candidates) < self._wanted:
            raise self._too_few(candidates)
        counts = self._counts(candidates, others)
        free = self._free(candidates, others)
        found = self._best(free, counts)
        last = self._last(free, before)
        if last and _sum(last, counts) <= _sum(found, counts):
            return last
        return found

    def _already(self, every: "Records") -> "tuple[Device, ...] | None":
        """Return the devices that are recorded for this container, None if none are.

        Each step of a start must find the same ones: the runtime, and its hook.
        """
        for record in every:
            for given in record["given"] if self._start.owns(record) else ():
                asked = [name.rpartition("=")[2] for name in given["request"]["devices"]]
                same = given["kind"] == self._vendor.names.KIND and any(map(is_any, asked))
                found = self._named(given["selected"]) if same else ()
                if len(found) == self._wanted:
                    return found
        return None

    def _last(self, free: "list[Device]", before: "Any") -> "tuple[Device, ...]":
        """Return the devices of the container's last start, () if one isn't free."""
        found = self._remembered(before)
        is_free = all(device in free for device in found)
        return found if len(found) == self._wanted and is_free else ()

    def _remembered(self, before: "Any") -> "tuple[Device, ...]":
        """Return the devices of the container's last start that exist."""
        key = [self._start.container, self._start.bundle, self._vendor.names.KIND]
        return self._named(next((each[3] for each in before if each[:3] == key), ()))

    def _named(self, ids: "Iterable[str]") -> "tuple[Device, ...]":
        wanted = frozenset(ids)
        return tuple(each for each in self._inventory.devices if each.id in wanted)

    def _counts(self, candidates: "list[Device]", others: "Records") -> dict[str, int]:
        """Return the number of containers that have each device."""
        counts = dict.fromkeys((device.id for device in candidates), 0)
        for selected, every in _held(others, self._vendor.names.KIND):
            for device in candidates:
                counts[device.id] += device.id in every or device.parent in selected
        return counts

    def _free(self, candidates: "list[Device]", others: "Records") -> "list[Device]":
        """Return those that the container may have; HeldError if that are too few."""
        if not self._is_exclusive:
            return candidates
        names = self._vendor.names
        free, held = [], []
        for device in candidates:
            given = records.given(names, self._inventory, [device], ())
            try:
                leases.refuse({"given": [given]}, others, (names.KIND,))  # protects: choice-free
                free.append(device)
            except HeldError as error:
                held.append(f"{device.label} in use by {error.holder}")
        apart = self._vendor.only_neighbours and not _runs(free, self._wanted)
        if len(free) >= self._wanted and not apart:
            return free
        there = f"{len(free)} of {len(candidates)} {'are' if len(free) != 1 else 'is'} free here"
        raise HeldError(
            f"{self._asked()}{', side by side' if apart else ''}; {there}, and {names.KIND} is "
            f"exclusive: {listed(held, _MOST_HOLDERS)}",
            "Stop one of these containers, or ask for fewer; `gpuhook list` shows all",
        )

    def _best(self, free: "list[Device]", counts: dict[str, int]) -> "tuple[Device, ...]":
        """Return the devices with the fewest containers, of equals the nearest, then the first."""
        if self._vendor.only_neighbours:
            runs = _runs(free, self._wanted)
            if not runs:
                raise self._too_few(free)
            return min(runs, key=lambda run: _sum(run, counts))
        order = sorted(free, key=lambda device: counts[device.id])
        most = counts[order[self._wanted - 1].id]
        must = [device.id for device in order if counts[device.id] < most]
        equal = [device.id for device in free if counts[device.id] == most]
        needed = self._wanted - len(must)
        if self._wanted > 1:
            equal = nearness.best(must, equal, needed, _score(self._inventory, free))
        return self._named([*must, *equal[:needed]])

    def _asked(self) -> str:
        noun = self._vendor.names.NOUN
        return f"The container asks for any {self._wanted} {noun}{'s' * (self._wanted > 1)}"

    def _too_few(self, candidates: "list[Device]") -> UnknownDeviceError:
        together = " side by side" if self._vendor.only_neighbours else ""
        has = f"{len(candidates) or 'none'}{together if candidates else ''}"
        return UnknownDeviceError(
            f"{self._asked()}, and this host has {has} that can be used",
            "Ask for fewer, or for all; `gpuhook info` lists them",
        )

    # What is written ---------------------------------------------------------------------

    def _write(self, folder: "StateDirectory", devices: "tuple[Device, ...]") -> None:
        """Write the record of the start, which counts while its process lives."""
        start = self._start
        grant = contract.Grant(self._vendor, self._request, self._inventory, devices)
        process = os.open(f"/proc/{start.process}", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            now = records.now(process)
        finally:
            os.close(process)
        state = ContainerState(start.container, start.process, start.bundle, None)
        record = {**records.describe(state, start.annotations, [grant]), **now, "starting": True}
        record["boot"] = boot_id()
        record["cgroups"] = {}
        for other in records.read_folder(folder, []):
            if records.name_of(other) == records.name_of(record):  # another vendor's
                kept = [each for each in other["given"] if each["vendor"] != self._request.vendor]
                record["given"] = [*kept, *record["given"]]
        records.write(folder, record)


def _separate(vendor: "Vendor", inventory: "Inventory") -> "list[Device]":
    """Return the usable devices to choose from: whole ones that aren't divided, else parts."""
    usable = [device for device in inventory.devices if not device.state]
    whole = [
        device
        for device in usable
        if not device.parent and not vendor.is_divided(device, inventory)
    ]
    return whole or [device for device in usable if device.parent]


def _held(others: "Records", kind: str) -> "list[tuple[set[str], set[str]]]":
    """Return the devices of each container, and those with the ones that its parts belong to.

    The record of a start isn't counted once its container has its own.
    """
    boot = boot_id()
    found = []
    for record in others:
        if record.get("boot", boot) != boot:
            continue
        if record.get("starting") and any(
            not each.get("starting") and records.is_start_of(record, each) for each in others
        ):
            continue
        given = [each for each in record["given"] if each["kind"] == kind]
        if given:
            selected = {name for each in given for name in each["selected"]}
            found.append((selected, selected.union(*(each["nodes"] for each in given))))
    return found


def _sum(devices: "Iterable[Device]", counts: dict[str, int]) -> int:
    return sum(counts[device.id] for device in devices)


def _runs(devices: "list[Device]", length: int) -> "list[tuple[Device, ...]]":
    """Return the runs of that length of devices with successive numbers."""
    by_number = {int(device.label): device for device in devices}
    runs = ([by_number.get(first + at) for at in range(length)] for first in sorted(by_number))
    return [tuple(run) for run in runs if None not in run]  # type: ignore[arg-type]


def _score(inventory: "Inventory", devices: "list[Device]") -> "Callable[[str, str], int]":
    """Return the proximity of two devices by id: their NUMA node, and their place in the tree."""
    below = inventory.root.rstrip("/") + _PCI
    below = below if os.path.isdir(below) else _PCI
    places = {}
    for device in devices:
        path = f"{below}/{device.bus_id}"
        numa = fingerprint.text(f"{path}/numa_node").strip() if device.bus_id else ""
        places[device.id] = numa, os.path.realpath(path).split("/")

    def score(one: str, other: str) -> int:
        (numa, path), (other_numa, other_path) = places[one], places[other]
        same = 0
        while same < min(len(path), len(other_path)) and path[same] == other_path[same]:
            same += 1
        return same + _NUMA * (numa.isdecimal() and numa == other_numa)

    return score


# What is remembered ------------------------------------------------------------------------------


def _remembered(folder: "StateDirectory") -> "list[Any]":
    """Return the last choices: container, bundle, kind and devices of each."""
    try:
        found = folder.load(CHOICES, _MOST_BYTES)
    except (OSError, ValueError):  # it is replaced
        return []
    return found if jsontext.has_form(found, [(str, str, str, [str])]) else []


def _remember(
    folder: "StateDirectory",
    before: "list[Any]",
    start: ChoiceContext,
    names: "ModuleType",
    devices: "tuple[Device, ...]",
) -> None:
    """Remember a choice for the container's next start, and forget the oldest."""
    if not start.container or len(start.bundle) > _LONGEST:
        return
    key = [start.container, start.bundle, names.KIND]
    kept = [each for each in before if each[:3] != key][1 - _REMEMBERED :]
    choices = [*kept, [*key, [device.id for device in devices]]]
    folder.replace(CHOICES, jsontext.dumps(choices).encode())


# In CDI specs ------------------------------------------------------------------------------------


def names_in_documents(
    kind: str, devices: "tuple[Device, ...]", inventory: "Inventory", config: "Config"
) -> tuple[str, ...]:
    """Return the names in CDI specs of chosen devices; UnknownDeviceError if one has none.

    A device is known by its nodes: an old spec's 0 may be another one now.
    """
    from gpuhook.base.errors import CdiError  # noqa: PLC0415 - few containers need it
    from gpuhook.core import spec_devices  # noqa: PLC0415 - as above
    from gpuhook.core.cdi import apply, parse_cache  # noqa: PLC0415 - as above

    found: dict[str, str] = {}
    for name, described in parse_cache.read_folders(config).devices.items():
        if name.partition("=")[0] != kind:
            continue
        try:
            numbers = spec_devices.numbers(apply.apply({}, described.edits))
        except CdiError:  # a node that this host lacks
            continue
        given = spec_devices.devices_of(numbers, inventory)
        if len(given) == 1:
            found.setdefault(given[0].id, name)
    for device in devices:
        if device.id not in found:
            raise UnknownDeviceError(
                f"No CDI spec has a device of {kind} with the nodes of {shown(device.label)}, "
                f"which was chosen for {ANY}",
                "Make the CDI spec again with `gpuhook cdi generate`",
            )
    return tuple(found[device.id] for device in devices)

"""Devices in a container's record that it got, or lost again, while it was running.

Each entry of the record's key ``attached`` has ``devices``, the nodes that the container's cgroup
denied before, and ``places``, the nodes that were mounted; until the attachment is done, those that
may be. ``lasts`` tells whether systemd knows that they are allowed.
"""

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from gpuhook.base.config.model import Config
from gpuhook.base.errors import ContainerError
from gpuhook.base.state_directory import StateDirectory
from gpuhook.core import contract
from gpuhook.core.contract import Grant
from gpuhook.core.inventory.model import Inventory
from gpuhook.core.records import records
from gpuhook.monitor.containers.nodes import Numbers
from gpuhook.vendors import registry

SOURCE = "attach"  # of the request in a record
_WAIT = 120.0  # seconds for another change of a container: each of its steps has a limit

Record = dict[str, Any]
Ids = Collection[tuple[str, str]]  # devices, by vendor and id


@contextlib.contextmanager
def one_at_a_time(folder: StateDirectory) -> Iterator[None]:
    """Wait until no other process changes attached devices, and let none do so meanwhile.

    Devices of a container share nodes, and their access is changed in several steps. ``folder`` is
    the records' folder. ContainerError if that takes too long.
    """
    try:
        held = folder.lock(records.CHANGES, _WAIT)  # protects: attach-one-at-a-time
    except TimeoutError:
        raise ContainerError(
            "Another process hasn't finished changing the devices of a container",
            "Wait for gpuhook attach, detach or repair, and run this again",
        ) from None
    with held:
        yield


def entries(grant: Grant, pairs: Iterable[Numbers]) -> list[Record]:
    """Return the entries of a grant's devices with these nodes."""
    new = {*pairs}
    nodes = [list(pair) for pair in sorted(new)]
    # protects: attach-killed
    places = [each.inside or each.path for each, _ in grant.nodes if each.numbers in new]
    vendor = grant.vendor.names.NAME
    entry = {"vendor": vendor, "devices": nodes, "places": places, "lasts": False}
    return [{**entry, "device": name} for name in grant.ids]


def ids_of(record: Record) -> set[tuple[str, str]]:
    """Return the attached devices of a record."""
    return {(each["vendor"], each["device"]) for each in record.get("attached", ())}


def lasting(record: Record) -> set[Numbers]:
    """Return the attached nodes that systemd knows."""
    found = [each["devices"] for each in record.get("attached", ()) if each["lasts"]]
    return {(major, minor) for pairs in found for major, minor in pairs}


def mounted(record: Record, ids: Ids, places: Sequence[str], *, lasts: bool) -> Record:
    """Return a record with the places of nodes, which systemd may know, of attached devices."""
    done = {"places": [*places], "lasts": lasts}
    found = [
        {**each, **(done if (each["vendor"], each["device"]) in ids else {})}
        for each in record.get("attached", ())
    ]
    return {**record, "attached": found}


def added(record: Record, grants: Iterable[Grant], new: Sequence[Record]) -> Record:
    """Return a record with all devices of grants; ``new`` are the entries of the attached ones."""
    given = {each["vendor"]: each for each in record["given"]}
    for grant in grants:
        names = grant.vendor.names
        found = records.given(names, grant.inventory, grant.devices, grant.rules())
        found["request"] = {"source": SOURCE, "devices": list(grant.request.devices or ())}
        if old := given.get(names.NAME):
            alone = {**old.get("alone", {}), **found["alone"]}
            found = {**records.added(old, found), "request": old["request"], "alone": alone}
        given[names.NAME] = found
    return {
        **record,
        "given": [*given.values()],
        "attached": [*record.get("attached", ()), *new],
    }


class RemainingRecord(NamedTuple):
    """A record without some attached devices.

    ``denied`` are the nodes for its cgroup to deny, ``places`` those to unmount, by number.
    """

    record: Record
    denied: list[Numbers]
    places: dict[Numbers, str]


def removed(
    record: Record, ids: Ids, inventories: Mapping[str, Inventory], config: Config
) -> RemainingRecord:
    """Return a record without attached devices, and the nodes that no other device needs."""
    gone: list[Record] = []
    left: list[Record] = []
    for each in record.get("attached", ()):
        (gone if (each["vendor"], each["device"]) in ids else left).append(each)
    given: list[Record] = []
    denied: set[Numbers] = set()
    places: dict[Numbers, str] = {}
    for each in record["given"]:
        vendor = each["vendor"]
        out = [entry for entry in gone if entry["vendor"] == vendor]
        if not out:
            given.append(each)
            continue
        inventory = inventories[vendor]
        grant = _remaining(each, {entry["device"] for entry in out}, inventory, config)
        needed = {*grant.rules()} if grant.devices else set()
        others = [number for number, entry in enumerate(left) if entry["vendor"] == vendor]
        for number in others:
            left[number] = _inheriting(left[number], out, needed)
        without = {pair for entry in out for pair in _pairs(entry["devices"])} - needed
        denied |= without
        dropped = without | (_own(each, grant) - needed)
        known = {place for entry in out for place in entry["places"]}
        for node in inventory.nodes:
            if node.numbers in dropped and (place := node.inside or node.path) in known:
                places[node.numbers] = place
        if grant.devices or each["request"]["source"] != SOURCE:
            given.append(_without(each, grant, dropped))
    limits = [each for each in record.get("limits", ()) if (each["vendor"], each["id"]) not in ids]
    found = {**record, "given": given, "attached": left, "limits": limits}
    return RemainingRecord(found, sorted(denied), places)


def _pairs(found: Iterable[Sequence[int]]) -> set[Numbers]:
    return {(major, minor) for major, minor in found}


def _inheriting(entry: Record, out: Iterable[Record], needed: set[Numbers]) -> Record:
    """Return an entry with the nodes of removed ones that other devices need."""
    pairs, places = _pairs(entry["devices"]), {*entry["places"]}
    for each in out:
        pairs |= _pairs(each["devices"]) & needed
        places |= {*each["places"]}
    return {**entry, "devices": [list(pair) for pair in sorted(pairs)], "places": sorted(places)}


def _own(given: Record, grant: Grant) -> set[Numbers]:
    """Return the nodes of the devices that a container doesn't keep."""
    kept = records.given(grant.vendor.names, grant.inventory, grant.devices, ())["nodes"]
    return {
        pair for name, pairs in given["nodes"].items() if name not in kept for pair in _pairs(pairs)
    }


def _remaining(given: Record, out: set[str], inventory: Inventory, config: Config) -> Grant:
    """Return the grant of a vendor's devices that a container keeps."""
    ids = {*given["selected"]} - out
    devices = [device for device in inventory.devices if device.id in ids]
    vendor = contract.load(registry.all_vendors(config)[given["vendor"]])
    return Grant.of_document(vendor, inventory, config, devices)


def _without(given: Record, grant: Grant, dropped: set[Numbers]) -> Record:
    """Return a vendor's part of a record with only the devices of a grant."""
    kept = records.given(grant.vendor.names, grant.inventory, grant.devices, ())["nodes"]
    return {
        **given,
        "selected": [name for name in given["selected"] if name in grant.ids],
        "nodes": {name: pairs for name, pairs in given["nodes"].items() if name in kept},
        "alone": {pair: name for pair, name in given.get("alone", {}).items() if name in kept},
        "devices": [pair for pair in given["devices"] if tuple(pair) not in dropped],
    }

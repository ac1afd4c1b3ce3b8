"""The difference between a node's desired and actual ResourceSlices, as writes. Pure.

A pool is one driver's devices on one node, in several slices. The rules are those of the API
(resource/v1, ResourcePool). All slices of a pool have the same generation and its number of slices.
Of several generations only the newest complete one counts. So a change of more than one write gets
a new generation, and a change of one write keeps it.
"""

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from typing import Any

Object = dict[str, Any]

CREATE, UPDATE, DELETE = "create", "update", "delete"
_INDEX = re.compile(r"([0-9a-f]{5,8})-")
_QUANTITY = re.compile(r"([-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?)([a-zA-Z]*)")
_UNITS = {
    "": Decimal(1), "n": Decimal("1e-9"), "u": Decimal("1e-6"), "m": Decimal("1e-3"),
    "k": Decimal(10**3), "M": Decimal(10**6), "G": Decimal(10**9), "T": Decimal(10**12),
    "P": Decimal(10**15), "E": Decimal(10**18), "Ki": Decimal(2**10), "Mi": Decimal(2**20),
    "Gi": Decimal(2**30), "Ti": Decimal(2**40), "Pi": Decimal(2**50), "Ei": Decimal(2**60),
}  # fmt: skip
# Fields that a cluster silently drops if a feature gate is off -> the gate, and the consequence.
_UNCOUNTED = (
    "DRAPartitionableDevices",
    "of the devices that share a GPU only those are published that can be used together",
)
GATES = {
    "taints": ("DRADeviceTaints", "unhealthy devices are left out instead"),
    "consumesCounters": _UNCOUNTED,
    "sharedCounters": _UNCOUNTED,
    "allowMultipleAllocations": (
        "DRAConsumableCapacity",
        "no device goes to several claims",
    ),
}
_OURS = ("name", "attributes", "capacity", *GATES)  # fields of a device that must match


@dataclass(frozen=True)
class SliceWrite:
    """One request: an operation that makes the cluster's slice ``there`` equal to ``want``."""

    what: str
    there: Object
    want: Object


@dataclass(frozen=True)
class Pool:
    """All slices of one pool: its driver, and each slice's content without pool and owner."""

    driver: str
    name: str
    contents: tuple[Object, ...]


def pools(slices: Iterable[Object]) -> list[Pool]:
    """Return the pools of slices in the form that --dry-run prints."""
    found: dict[tuple[str, str], list[Object]] = {}
    for each in slices:
        spec = each["spec"]
        rest = {key: spec[key] for key in spec if key not in ("driver", "pool", "nodeName")}
        found.setdefault((spec["driver"], spec["pool"]["name"]), []).append(rest)
    return [Pool(driver, name, tuple(contents)) for (driver, name), contents in found.items()]


def plan(
    pool: Pool,
    there: Sequence[Object],
    node: str,
    owner: Object,
    known: int,
    is_right: Callable[[Object, Object], bool],
) -> tuple[list[SliceWrite], int]:
    """Return the ordered requests that update a pool's slices, and the pool's generation.

    ``owner`` is the owner reference to the node, ``known`` the last known generation, and
    ``is_right(wanted, there)`` tells whether a slice may stay.
    """
    newest = max([known, *(_generation(each) for each in there)])
    kept: dict[int, Object] = {}
    gone = []
    for each in sorted(there, key=_name):
        index = _index(each)
        right = _generation(each) == newest and index < len(pool.contents) and index not in kept
        if right:
            kept[index] = each
        else:
            gone.append(each)
    wanted = _wanted(pool, node, owner, max(newest, 1))
    writes = _writes(wanted, kept, is_right)
    current = [each for each in gone if _generation(each) == newest]
    if len(writes) + len(current) > 1:  # protects: slice-generation
        newest = max(newest, 1) + 1 if there or known else 1
        wanted = _wanted(pool, node, owner, newest)
        writes = _writes(wanted, kept, is_right)
    return [*(SliceWrite(DELETE, each, {}) for each in gone), *writes], max(newest, 1)


def _wanted(pool: Pool, node: str, owner: Object, generation: int) -> list[Object]:
    count = len(pool.contents)
    named = {"name": pool.name, "generation": generation, "resourceSliceCount": count}
    return [
        {
            "kind": "ResourceSlice",
            "metadata": {
                "generateName": f"{number:05x}-{pool.driver}-{node}-",
                "ownerReferences": [owner],
            },
            "spec": {"driver": pool.driver, "nodeName": node, "pool": named, **content},
        }
        for number, content in enumerate(pool.contents)
    ]


def _writes(
    wanted: list[Object], kept: dict[int, Object], is_right: Callable[[Object, Object], bool]
) -> list[SliceWrite]:
    found = []
    for number, want in enumerate(wanted):
        there = kept.get(number)
        if there is None:
            found.append(SliceWrite(CREATE, {}, want))
        elif not is_right(want, there):
            found.append(SliceWrite(UPDATE, there, want))
    return found


def updated(write: SliceWrite) -> Object:
    """Return the body of an update, with the current name, version and times of taints.

    Metadata that others have written stays.
    """
    there, want = write.there, write.want
    metadata = {**there["metadata"], "ownerReferences": want["metadata"]["ownerReferences"]}
    metadata.pop("managedFields", None)
    spec = {**want["spec"]}
    if "devices" in spec:
        before = {each.get("name"): each for each in there["spec"].get("devices") or []}
        spec["devices"] = [_with_times(each, before.get(each["name"])) for each in spec["devices"]]
    return {"kind": want["kind"], "metadata": metadata, "spec": spec}


def _with_times(device: Object, before: Object | None) -> Object:
    """Return a device whose existing taints keep the time at which they were added."""
    if not device.get("taints") or before is None:
        return device
    times = {
        _taint(each): each["timeAdded"]
        for each in before.get("taints") or []
        if each.get("timeAdded")
    }
    taints = [
        {**each, "timeAdded": times[_taint(each)]} if _taint(each) in times else each
        for each in device["taints"]
    ]
    return {**device, "taints": taints}


def _taint(given: Object) -> tuple[Any, Any, Any]:
    return given.get("key"), given.get("value"), given.get("effect")


# Comparing --------------------------------------------------------------------------------------


def is_same(want: Object, there: Object) -> bool:
    """Tell whether a slice has the desired content; additions by the server are ignored."""
    owners = there["metadata"].get("ownerReferences") or []
    right = any(_holds(each, owners) for each in want["metadata"]["ownerReferences"])
    return right and _spec(want["spec"]) == _spec(there["spec"])


def _holds(owner: Object, owners: Sequence[Object]) -> bool:
    return any(all(each.get(key) == owner[key] for key in owner) for each in owners)


def _spec(given: Object) -> Object:
    """Return the relevant fields of a slice in a normalized form."""
    pool = given.get("pool") or {}
    names = ("driver", "nodeName", "nodeSelector", "allNodes", "perDeviceNodeSelection")
    return {
        **{name: given[name] for name in names if given.get(name)},
        "pool": [pool.get(key) for key in ("name", "generation", "resourceSliceCount")],
        "devices": [_device(each) for each in given.get("devices") or []],
        "sharedCounters": [_numbers(each) for each in given.get("sharedCounters") or []],
    }


def _device(given: Object) -> Object:
    found = {name: given[name] for name in _OURS if given.get(name)}
    if "taints" in found:
        found["taints"] = [_taint(each) for each in found["taints"]]
    for name in ("capacity", "consumesCounters"):
        if name in found:
            found[name] = _numbers(found[name])
    return found


def _numbers(given: Any) -> Any:
    """Return nested quantities as numbers: a server writes 1000 as 1k."""
    if isinstance(given, list):
        return [_numbers(each) for each in given]
    if not isinstance(given, dict):
        return given
    return {
        key: quantity(value) if key == "value" else _numbers(value) for key, value in given.items()
    }


def quantity(text: Any) -> Any:
    """Return a Kubernetes quantity as a number, and other values unchanged."""
    match = _QUANTITY.fullmatch(text) if isinstance(text, str) else None
    if match is None or match[2] not in _UNITS:
        return text
    try:
        return Decimal(match[1]) * _UNITS[match[2]]
    except InvalidOperation:
        return text


# Fields that a cluster drops ----------------------------------------------------------------------


def dropped(want: Object, came: Object) -> set[str]:
    """Return the fields that a server accepted but dropped, by their names in ``GATES``."""
    found = set()
    spec, back = want["spec"], came.get("spec") or {}
    if spec.get("sharedCounters") and not back.get("sharedCounters"):
        found.add("sharedCounters")
    devices = {each.get("name"): each for each in back.get("devices") or []}
    for each in spec.get("devices") or []:
        kept = devices.get(each["name"], {})
        found |= {name for name in GATES if each.get(name) and not kept.get(name)}
    return found


def without(given: Sequence[Pool], lacking: Collection[str]) -> list[Pool]:
    """Return pools that stay correct in a cluster that drops these fields.

    Without taints, unhealthy devices are left out. Without counters, of devices that share
    something, only the first ones that fit together are published, so that nothing is allocated
    twice.
    """
    if not lacking:
        return [*given]
    return [_pool_without(pool, {*lacking}) for pool in given]


def _pool_without(pool: Pool, lacking: set[str]) -> Pool:
    is_uncounted = bool(lacking & {"consumesCounters", "sharedCounters"})
    left = {
        (one["name"], name): quantity(each["value"])
        for content in pool.contents
        for one in content.get("sharedCounters") or []
        for name, each in one["counters"].items()
    }
    contents = []
    for content in pool.contents:
        if is_uncounted and not content.get("devices") and content.get("sharedCounters"):
            continue
        devices = content.get("devices") or []
        if "taints" in lacking:
            devices = [each for each in devices if not _keeps_away(each)]
        if is_uncounted:
            devices = [each for each in devices if _takes(each, left)]
        leave = {*lacking, *(("consumesCounters",) if is_uncounted else ())}
        kept = [{key: each[key] for key in each if key not in leave} for each in devices]
        # Devices come first: a slice of 1.34 has both.
        rest = {key: content[key] for key in content if key not in {"devices", *leave}}
        if is_uncounted:
            rest.pop("sharedCounters", None)
        contents.append({**rest, "devices": kept} if "devices" in content else rest)
    return replace(pool, contents=tuple(contents or [{"devices": []}]))


def _keeps_away(device: Object) -> bool:
    return any(each.get("effect") != "None" for each in device.get("taints") or [])


def _takes(device: Object, left: dict[tuple[str, str], Any]) -> bool:
    """Tell whether the counters that a device uses are left, and subtract them."""
    uses = {
        (one["counterSet"], name): quantity(each["value"])
        for one in device.get("consumesCounters") or []
        for name, each in one["counters"].items()
    }
    if any(left.get(key, 0) < count for key, count in uses.items()):
        return False
    for key, count in uses.items():
        left[key] -= count
    return True


def taints(slices: Iterable[Object]) -> set[tuple[Any, ...]]:
    """Return all taints, each with its driver and device."""
    return {
        (each["spec"]["driver"], device["name"], *_taint(taint))
        for each in slices
        for device in each["spec"].get("devices") or []
        for taint in device.get("taints") or []
    }


def names(slices: Iterable[Object]) -> set[tuple[str, str]]:
    """Return all devices, by driver and name."""
    return {
        (each["spec"]["driver"], device["name"])
        for each in slices
        for device in each["spec"].get("devices") or []
    }


# Fields of a server's slice ----------------------------------------------------------------------


def _generation(given: Object) -> int:
    found = (given["spec"].get("pool") or {}).get("generation")
    return found if isinstance(found, int) else 0


def _name(given: Object) -> str:
    return str(given["metadata"].get("name", ""))


def _index(given: Object) -> int:
    """Return a slice's index in its pool; an impossible one if its name has none."""
    match = _INDEX.match(_name(given))
    return int(match[1], 16) if match else 1 << 32

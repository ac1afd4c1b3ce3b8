"""Limits of the memory that a container may use of its devices: which there are, and setting them.

A limit belongs to the container's own cgroup: it is set after that was made and before the
container's program runs, and is gone with it. One that can't be set fails the start.
"""

import os

from gpuhook.ground.cgroup import access, dmem
from gpuhook.ground.errors import (
    DriverError,
    LimitError,
    NoDriverError,
    UnknownDeviceError,
    shown,
)
from gpuhook.ground.host import proc
from gpuhook.ground.names import MEMORY_VARIABLE, cdi_parts
from gpuhook.ground.sizes import amount
from gpuhook.start import contract, given_nodes
from gpuhook.start.inventory import cache, selection
from gpuhook.start.plan.operations import Operation
from gpuhook.start.request import limits as words
from gpuhook.start.request.reader import Request, SpecReader, is_privileged

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from typing import Any

    from gpuhook.ground.config.model import Config
    from gpuhook.ground.container.changes import Container
    from gpuhook.ground.oci.spec import Spec
    from gpuhook.ground.sizes import Size
    from gpuhook.start.contract import Grant, Known, Vendor
    from gpuhook.start.inventory.model import Device, Inventory
    from gpuhook.start.limiter import Limiter, Use
    from gpuhook.start.request.limits import Word, Words

    # A device's id -> what the container says of it.
    Said = dict[str, list[tuple[Word, Size]]]


class LimitMemory(Operation):
    """Limit the memory that a container may use of a device, in its cgroup.

    All of a plan's are done together, before anything is mounted: see ``Limits``.
    """

    kind = "limit-memory"
    shown = ("kind", "vendor", "device", "id", "bytes", "means", "reason")

    def __init__(self, grant: "Grant", device: "Device", limit: int, means: str, why: str) -> None:
        super().__init__(why)
        self.vendor = grant.vendor.names.NAME
        self.noun = grant.vendor.names.NOUN
        self.device = device.label
        self.id = device.id
        self.bytes = limit
        self.means = means

    def describe(self) -> str:
        """Say which device, how much and by what."""
        what = f"{self.noun} {self.device} to {amount(self.bytes)}"
        return f"limit the memory of {what} ({self.means})"


class Limits:
    """The limits of one container's devices, and what sets them."""

    def __init__(self, parts: "list[tuple[Limiter, list[LimitMemory]]]") -> None:
        self.operations = [op for _, operations in parts for op in operations]
        # Where config.json has cgroups read-only; None where the limits are the container's own.
        self.promised: set[str] | None = None
        self._parts = parts
        self.are_slow = any(limiter.is_slow for limiter, _ in parts)

    def begin(self) -> None:
        """Do beforehand what takes time."""
        for limiter, _ in self._parts:
            limiter.begin()

    def set(
        self,
        process: int,
        written: "Mapping[int, str] | None" = None,
        container: "Container | None" = None,
    ) -> None:
        """Set all limits; LimitError, and no container may be started, if one can't be.

        ``process`` is a descriptor of /proc/PID of its first process; ``written`` are its cgroups
        by version, where they were written down. ``container`` is there where it is
        being created: all is mounted, and its root isn't pivoted.
        """
        try:
            tree, folder = dmem.place_of(process, written=written)
            if self.promised is not None and container is not None:
                _check_mounts(process, container, self.promised)  # protects: limit-writable
                dmem.have_no_children(folder)  # protects: limit-childless
            for limiter, operations in self._parts:
                limiter.set(tree, folder, {op.id: op.bytes for op in operations})
            # The path that was limited is the container's still, and not another one's by now.
            if dmem.place_of(process, written=written) != (tree, folder):
                raise LimitError(
                    "The container has changed its cgroup while its memory was limited",
                    "Start the container again",
                )
        finally:
            self.close()

    def used(self, tree: str, folders: "Iterable[str]") -> "dict[str, Use]":
        """Return by cgroup what it uses of each device, and its limit there.

        By the devices' ids, in bytes; None is no limit. LimitError where that can't be had.
        """
        places = [*folders]
        found: dict[str, Use] = {folder: {} for folder in places}
        try:
            for limiter, _ in self._parts:
                for folder, used in limiter.used(tree, places).items():
                    found[folder].update(used)
        finally:
            self.close()
        return found

    def close(self) -> None:
        """Let go of what ``begin`` made."""
        for limiter, _ in self._parts:
            limiter.close()

    def to_json(self) -> "list[dict[str, Any]]":
        """Return them as they are written down."""
        keys = ("vendor", "device", "id", "bytes")
        return [{key: getattr(op, key) for key in keys} for op in self.operations]


def recorded(
    entries: "Iterable[dict[str, Any]]",
    inventories: "Iterable[Inventory]",
    known: "Known",
    config: "Config",
) -> Limits | None:
    """Return the limits that were written down of a container, None where there are none.

    LimitError for a device that this machine no longer has, or can't limit any more.
    """
    by_vendor: dict[str, dict[str, int]] = {}
    for entry in entries:
        by_vendor.setdefault(entry["vendor"], {})[entry["id"]] = entry["bytes"]
    there = {each.vendor: each for each in inventories}
    parts: list[tuple[Limiter, list[LimitMemory]]] = []
    for name, wanted in by_vendor.items():
        inventory = there.get(name)
        every = inventory.devices if inventory is not None else ()
        devices = [device for device in every if device.id in wanted]
        if inventory is None or len(devices) < len(wanted):
            raise LimitError(
                "The container has a limit for a device that this machine no longer has",
                "Start the container again",
            )
        granted = _grant(contract.load(known[name]), inventory, devices)
        limiter = granted.vendor.limiter(granted, config)
        operations = [
            LimitMemory(granted, device, wanted[device.id], limiter.means(device), "its record")
            for device in devices
        ]
        parts.append((limiter, operations))
    return Limits(parts) if parts else None


def find(
    spec: "Spec",
    config: "Config",
    known: "Known",
    asked: "Sequence[Grant]",
    inventories: "Mapping[str, Inventory]",
) -> Limits | None:
    """Return the limits that a container gets, as ``resolve.limits`` does; one may concern it.

    ``asked`` is what it is granted of what it asks us for.
    """
    others = _given_by_others(spec, config, known, asked, inventories)
    for grant in others:  # protects: given-by-others
        contract.check_others(grant, config)
    every = [*asked, *others]
    grants = [grant for grant in every if grant.devices]
    if not grants:
        return None
    vendors = {grant.vendor.names.NAME: grant.vendor.names for grant in grants}
    said = words.read(SpecReader(spec.data, config), vendors.values())
    limits = of_grants(grants, said, config)
    imposed = config.limits_memory or said.imposed  # protects: limit-imposed
    if limits is not None and imposed and not is_privileged(spec.data):
        limits.promised = _promised(spec)
    return limits


def _promised(spec: "Spec") -> "set[str]":
    """Return where config.json has the container's cgroups mounted read-only, by their type.

    A volume of cgroups isn't among them: its source may lead elsewhere by now.
    """
    found = set()
    for mount in given_nodes.objects(spec.data.get("mounts")):
        options, place = mount.get("options"), mount.get("destination")
        words = options if isinstance(options, list) else []
        last = [word for word in words if word in ("ro", "rw")][-1:]
        is_bind = "bind" in words or "rbind" in words or "rrw" in words
        is_own = mount.get("type") in ("cgroup", "cgroup2") and not is_bind
        if is_own and last == ["ro"] and isinstance(place, str):
            found.add(place)
    return found


def _check_mounts(process: int, container: "Container", promised: "set[str]") -> None:
    """Refuse a container that has cgroup v2 mounted where it can write to it; LimitError.

    It could leave its own cgroup, or change what is set there. What another mount covers counts,
    too: whoever shares a volume with it may rename folders under both.

    ``promised`` is where config.json has them read-only. crun makes a mount so after the hooks
    alone, so its word is taken there, for a place that nothing else is mounted at: which mount of
    config.json has come to which place isn't known otherwise, because links lead there.
    """
    mounts = [*container.mounts()]
    places = [path for path, _ in mounts]
    writable = [
        path
        for path, mount in mounts
        if mount.kind == b"cgroup2" and b"ro" not in mount.flags.split(b",")
    ]
    if writable and _is_runc(process):  # protects: limit-promised
        promised = set()
    for path in writable:
        if path not in promised or places.count(path) > 1:
            raise LimitError(
                f"The container may write to cgroups, which are mounted at {shown(path)}, and so "
                "undo a limit that others set",
                "Have the engine mount them read-only, as podman does with --systemd=false, and "
                "with rro what they are below",
            )


def _is_runc(process: int) -> bool:
    """Tell whether a container's first process, which runs no program of it yet, is runc's."""
    try:
        return proc.read("comm", process).startswith(b"runc")
    except OSError:  # it isn't known
        return True


def of_grants(grants: "Sequence[Grant]", said: "Words", config: "Config") -> Limits | None:
    """Return the limits of granted devices, None where there are none; LimitError."""
    about = _about(grants, said.said)
    general = config.device_memory or config.most_device_memory
    parts: list[tuple[Limiter, list[LimitMemory]]] = []
    for grant in grants:
        if general or any(device.id in about for device in grant.devices):
            limiter = grant.vendor.limiter(grant, config)
            operations = [*_operations(grant, limiter, about, said.privileged, config)]
            parts += [(limiter, operations)] if operations else []
    limits = Limits(parts)
    if config.limit_required:
        _check_all(grants, limits.operations)  # protects: limit-required
    return limits if parts else None


def _operations(
    grant: "Grant", limiter: "Limiter", about: "Said", privileged: bool, config: "Config"
) -> "Iterator[LimitMemory]":
    for device in grant.devices:
        name = f"{grant.vendor.names.NOUN} {device.label}"
        memory, said = limiter.memory[device.id], about.get(device.id, ())
        found = words.decide(said, memory, config, name, privileged=privileged)
        if found is not None:
            yield LimitMemory(grant, device, found[0], limiter.means(device), found[1])


def _check_all(grants: "Sequence[Grant]", operations: "list[LimitMemory]") -> None:
    limited = {op.id for op in operations}
    for grant in grants:
        for device in grant.devices:
            if device.id not in limited:
                raise LimitError(
                    f"This machine gives no device without a limit of its memory, and the "
                    f"container has none for {grant.vendor.names.NOUN} {device.label}",
                    f"Set {MEMORY_VARIABLE} in the container, or device-memory in {words.SECTION}",
                )


def _about(grants: "Sequence[Grant]", said: "Iterable[Word]") -> "Said":
    """Return what is said of each device that something is said of; LimitError."""
    found: Said = {}
    for word in said:
        for name, size in word.entries:
            for device in _named(grants, name, word.source):
                found.setdefault(device.id, []).append((word, size))
    return found


def _named(grants: "Sequence[Grant]", name: str, source: str) -> "list[Device]":
    """Return the container's devices that a name means, all of them for none and for all."""
    if name.lower() in ("", "all"):
        return [device for grant in grants for device in grant.devices]
    kind, _, bare = name.partition("=")
    by_kind = cdi_parts(name) is not None
    if by_kind:
        grants, name = [each for each in grants if kind == each.vendor.names.KIND], bare
    found = [matches for grant in grants if (matches := _matches(grant, name, source))]
    if len(found) > 1 and not by_kind:
        raise LimitError(
            f"{source} names {shown(name)}, which devices of several vendors are called",
            f"Name them by their kind, as {grants[0].vendor.names.KIND}={name} does",
        )
    if not found:
        raise words.unknown_name(name, source)
    return [device for each in found for device in each]


def _matches(grant: "Grant", name: str, source: str) -> "list[Device]":
    """Return the devices of a grant that a name means; none where it means none at all."""
    if name.lower() == "all":
        return [*grant.devices]
    vendor = grant.vendor.names
    try:
        found = selection.select((name,), grant.inventory, vendor, grant.request.spaces)
    except UnknownDeviceError:
        return []
    ids = {device.id for device in grant.devices}
    if not ids.intersection(device.id for device in found):
        return []
    if any(device.id not in ids for device in found):  # protects: limit-own-devices
        raise words.unknown_name(name, source)
    return [*found]


def _given_by_others(
    spec: "Spec",
    config: "Config",
    known: "Known",
    asked: "Sequence[Grant]",
    inventories: "Mapping[str, Inventory]",
) -> "list[Grant]":
    """Return what config.json gives a container of each vendor that it doesn't ask us for.

    Engines carry out CDI documents themselves, and give nodes by --device, or by rules alone: a
    container can make such a node itself. A privileged one that may have every device has them by
    its privilege. LimitError where it isn't known what it has, because a driver fails.
    """
    rules = [*given_nodes.objects(spec.device_rules)]
    # protects: limit-unprivileged
    if is_privileged(spec.data) and any(given_nodes.allows_all(rule) for rule in rules):
        return []
    has = given_nodes.numbers(spec.data, os.path.dirname(spec.path))
    opened = given_nodes.opened(rules)
    ours = {each.vendor.names.NAME: each.devices for each in asked}
    explained = {node.numbers for each in asked for node in each.inventory.nodes}
    found: list[Grant] = []
    failed: DriverError | None = None
    for names in known.values() if has or opened else ():
        vendor = contract.load(names)
        try:
            inventory = inventories.get(names.NAME) or cache.get_inventory(config, vendor)
        except NoDriverError:  # nobody has devices of it
            continue
        except DriverError as error:
            failed = error
            continue
        nodes = {node.numbers for node in inventory.nodes}
        explained |= nodes
        allowed = access.openable(rules, nodes) if opened else set()
        before = ours.get(names.NAME, ())
        has_already = {name for device in before for name in (device.id, device.parent)}
        given = given_nodes.devices_of(has | allowed, inventory)  # protects: limit-by-rule
        more = [device for device in given if device.id not in has_already]
        if more:
            found.append(_grant(vendor, inventory, more))
    if failed is not None:
        _check_unknown((has | opened) - explained, failed)  # protects: limit-failing-driver
    return found


def _check_unknown(numbers: "set[tuple[int, int]]", error: DriverError) -> None:
    """Refuse a container with a device that may be one of a driver that fails; LimitError."""
    unknown = sorted(pair for pair in numbers if pair[0] not in given_nodes.SYSTEM)
    if unknown:
        raise LimitError(
            f"It isn't known whether the memory of the container's device {unknown[0][0]}:"
            f"{unknown[0][1]} must be limited: {error.cause}",
            error.remedy,
        )


def _grant(vendor: "Vendor", inventory: "Inventory", devices: "Iterable[Device]") -> "Grant":
    """Return a grant of devices that nobody has asked us for."""
    return contract.Grant(vendor, Request(vendor.names.NAME), inventory, tuple(devices))

"""Memory limits of a container's devices: finding them and setting them.

A limit belongs to the container's own cgroup: it is set after the cgroup was created and before
the container's program runs, and is gone with it. One that can't be set fails the start.
"""

import os

from gpuhook.base.cgroup import access, dmem
from gpuhook.base.errors import (
    DriverError,
    MemoryLimitError,
    NoDriverError,
    UnknownDeviceError,
    shown,
)
from gpuhook.base.host import proc
from gpuhook.base.names import MEMORY_VARIABLE, cdi_parts
from gpuhook.base.sizes import amount
from gpuhook.core import contract, spec_devices
from gpuhook.core.inventory import cache, selection
from gpuhook.core.plan.operations import Operation
from gpuhook.core.request import memory_settings as words
from gpuhook.core.request.reader import Request, SpecReader, is_privileged

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from typing import Any

    from gpuhook.base.config.model import Config
    from gpuhook.base.container.changes import ContainerRootfs
    from gpuhook.base.oci.spec import Spec
    from gpuhook.base.sizes import Size
    from gpuhook.core.contract import Grant, Vendor, VendorRegistry
    from gpuhook.core.inventory.model import Device, Inventory
    from gpuhook.core.memory_limiter import MemoryLimiter, Use
    from gpuhook.core.request.memory_settings import MemorySetting, MemorySettings

    # A device's id -> the container's memory limit of it.
    Said = dict[str, list[tuple[MemorySetting, Size]]]


class LimitMemory(Operation):
    """A limit of a device's memory, set in the container's cgroup.

    All limits of a plan are set together, before anything is mounted: see ``MemoryLimits``.
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
        """Return the device, the amount and the means."""
        what = f"{self.noun} {self.device} to {amount(self.bytes)}"
        return f"limit the memory of {what} ({self.means})"


class MemoryLimits:
    """The limits of one container's devices, and their limiters."""

    def __init__(self, parts: "list[tuple[MemoryLimiter, list[LimitMemory]]]") -> None:
        self.operations = [op for _, operations in parts for op in operations]
        # Where config.json has cgroups read-only; None if the limits are the container's own.
        self.promised: set[str] | None = None
        self._parts = parts
        self.are_slow = any(limiter.is_slow for limiter, _ in parts)

    def begin(self) -> None:
        """Do slow work beforehand."""
        for limiter, _ in self._parts:
            limiter.begin()

    def set(
        self,
        process: int,
        written: "Mapping[int, str] | None" = None,
        container: "ContainerRootfs | None" = None,
    ) -> None:
        """Set all limits; MemoryLimitError if one can't be set: then the container may not start.

        ``process`` is a descriptor of /proc/PID of its first process; ``written`` are its cgroups
        by version, if they are recorded. ``container`` is set while the container is being
        created: all is mounted, and its root isn't pivoted.
        """
        try:
            tree, folder = dmem.place_of(process, written=written)
            if self.promised is not None and container is not None:
                _check_mounts(process, container, self.promised)  # protects: limit-writable
                dmem.have_no_children(folder)  # protects: limit-childless
            for limiter, operations in self._parts:
                limiter.set(tree, folder, {op.id: op.bytes for op in operations})
            # The limited path must still belong to the container, and not to another one by now.
            if dmem.place_of(process, written=written) != (tree, folder):
                raise MemoryLimitError(
                    "The container has changed its cgroup while its memory was limited",
                    "Start the container again",
                )
        finally:
            self.close()

    def used(self, tree: str, folders: "Iterable[str]") -> "dict[str, Use]":
        """Return by cgroup its use of each device, and its limit there.

        By the devices' ids, in bytes; None means no limit. MemoryLimitError if they can't be read.
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
        """Release the resources of ``begin``."""
        for limiter, _ in self._parts:
            limiter.close()

    def to_json(self) -> "list[dict[str, Any]]":
        """Return the limits for the container's record."""
        keys = ("vendor", "device", "id", "bytes")
        return [{key: getattr(op, key) for key in keys} for op in self.operations]


def recorded(
    entries: "Iterable[dict[str, Any]]",
    inventories: "Iterable[Inventory]",
    vendors: "VendorRegistry",
    config: "Config",
) -> MemoryLimits | None:
    """Return the recorded limits of a container, None if there are none.

    MemoryLimitError for a device that this host no longer has, or can no longer limit.
    """
    by_vendor: dict[str, dict[str, int]] = {}
    for entry in entries:
        by_vendor.setdefault(entry["vendor"], {})[entry["id"]] = entry["bytes"]
    there = {each.vendor: each for each in inventories}
    parts: list[tuple[MemoryLimiter, list[LimitMemory]]] = []
    for name, wanted in by_vendor.items():
        inventory = there.get(name)
        every = inventory.devices if inventory is not None else ()
        devices = [device for device in every if device.id in wanted]
        if inventory is None or len(devices) < len(wanted):
            raise MemoryLimitError(
                "The container has a limit for a device that this host no longer has",
                "Start the container again",
            )
        granted = _grant(contract.load(vendors[name]), inventory, devices)
        limiter = granted.vendor.memory_limiter(granted, config)
        operations = [
            LimitMemory(granted, device, wanted[device.id], limiter.means(device), "its record")
            for device in devices
        ]
        parts.append((limiter, operations))
    return MemoryLimits(parts) if parts else None


def find(
    spec: "Spec",
    config: "Config",
    vendors: "VendorRegistry",
    asked: "Sequence[Grant]",
    inventories: "Mapping[str, Inventory]",
) -> MemoryLimits | None:
    """Return a container's limits for ``resolve.find_memory_limits``, which has checked for any.

    ``asked`` are the grants of what it requests from gpuhook.
    """
    others = _given_by_others(spec, config, vendors, asked, inventories)
    for grant in others:  # protects: given-by-others
        contract.check_others(grant, config)
    every = [*asked, *others]
    grants = [grant for grant in every if grant.devices]
    if not grants:
        return None
    granting = {grant.vendor.names.NAME: grant.vendor.names for grant in grants}
    said = words.read(SpecReader(spec.data, config), granting.values())
    limits = of_grants(grants, said, config)
    imposed = config.limits_memory or said.imposed  # protects: limit-imposed
    if limits is not None and imposed and not is_privileged(spec.data):
        limits.promised = _promised(spec)
    return limits


def _promised(spec: "Spec") -> "set[str]":
    """Return the read-only cgroup mounts of config.json, by their type.

    A volume of cgroups isn't among them: its source may lead elsewhere by now.
    """
    found = set()
    for mount in spec_devices.objects(spec.data.get("mounts")):
        options, place = mount.get("options"), mount.get("destination")
        words = options if isinstance(options, list) else []
        last = [word for word in words if word in ("ro", "rw")][-1:]
        is_bind = "bind" in words or "rbind" in words or "rrw" in words
        is_own = mount.get("type") in ("cgroup", "cgroup2") and not is_bind
        if is_own and last == ["ro"] and isinstance(place, str):
            found.add(place)
    return found


def _check_mounts(process: int, container: "ContainerRootfs", promised: "set[str]") -> None:
    """Refuse a container with a writable mount of cgroup v2; MemoryLimitError.

    It could leave its own cgroup, or change the settings there. Mounts under another mount count,
    too: a process that shares a volume with the container may rename folders under both.

    ``promised`` are the read-only ones of config.json. crun makes a mount read-only only after the
    hooks, so config.json is trusted for a place with no other mount. Which mount of config.json is
    at which place isn't known otherwise, because of links.
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
            raise MemoryLimitError(
                f"The container may write to cgroups, which are mounted at {shown(path)}, and so "
                "remove a limit that others set",
                "Let the engine mount them read-only, as podman does with --systemd=false, and "
                "with rro the mounts above them",
            )


def _is_runc(process: int) -> bool:
    """Tell whether a container's first process, before it executes its program, is runc's."""
    try:
        return proc.read("comm", process).startswith(b"runc")
    except OSError:  # unknown
        return True


def of_grants(
    grants: "Sequence[Grant]", said: "MemorySettings", config: "Config"
) -> MemoryLimits | None:
    """Return the limits of granted devices, None if there are none; MemoryLimitError."""
    about = _about(grants, said.said)
    general = config.device_memory or config.most_device_memory
    parts: list[tuple[MemoryLimiter, list[LimitMemory]]] = []
    for grant in grants:
        if general or any(device.id in about for device in grant.devices):
            limiter = grant.vendor.memory_limiter(grant, config)
            operations = [*_operations(grant, limiter, about, said.privileged, config)]
            parts += [(limiter, operations)] if operations else []
    limits = MemoryLimits(parts)
    if config.limit_required:
        _check_all(grants, limits.operations)  # protects: limit-required
    return limits if parts else None


def _operations(
    grant: "Grant", limiter: "MemoryLimiter", about: "Said", privileged: bool, config: "Config"
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
                raise MemoryLimitError(
                    f"This host gives no device without a memory limit, and the "
                    f"container has none for {grant.vendor.names.NOUN} {device.label}",
                    f"Set {MEMORY_VARIABLE} in the container, or device-memory in {words.SECTION}",
                )


def _about(grants: "Sequence[Grant]", said: "Iterable[MemorySetting]") -> "Said":
    """Return the words about each device that has some; MemoryLimitError."""
    found: Said = {}
    for word in said:
        for name, size in word.entries:
            for device in _named(grants, name, word.source):
                found.setdefault(device.id, []).append((word, size))
    return found


def _named(grants: "Sequence[Grant]", name: str, source: str) -> "list[Device]":
    """Return the container's devices that a name matches, all of them for none and for all."""
    if name.lower() in ("", "all"):
        return [device for grant in grants for device in grant.devices]
    kind, _, bare = name.partition("=")
    by_kind = cdi_parts(name) is not None
    if by_kind:
        grants, name = [each for each in grants if kind == each.vendor.names.KIND], bare
    found = [matches for grant in grants if (matches := _matches(grant, name, source))]
    if len(found) > 1 and not by_kind:
        raise MemoryLimitError(
            f"{source}: {shown(name)} is ambiguous, several vendors have a device of that name",
            f"Name it with its kind, as {grants[0].vendor.names.KIND}={name} does",
        )
    if not found:
        raise words.unknown_name(name, source)
    return [device for each in found for device in each]


def _matches(grant: "Grant", name: str, source: str) -> "list[Device]":
    """Return the devices of a grant that a name matches; none if it matches no device at all."""
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
    vendors: "VendorRegistry",
    asked: "Sequence[Grant]",
    inventories: "Mapping[str, Inventory]",
) -> "list[Grant]":
    """Return the devices of each vendor that config.json gives without a request to gpuhook.

    Engines carry out CDI specs themselves, and give nodes by --device, or only by rules: a
    container can create such a node itself. A privileged container with access to every device has
    them by its privilege. MemoryLimitError if its devices are unknown, because a driver fails.
    """
    rules = [*spec_devices.objects(spec.device_rules)]
    # protects: limit-unprivileged
    if is_privileged(spec.data) and any(spec_devices.allows_all(rule) for rule in rules):
        return []
    has = spec_devices.numbers(spec.data, os.path.dirname(spec.path))
    opened = spec_devices.opened(rules)
    ours = {each.vendor.names.NAME: each.devices for each in asked}
    explained = {node.numbers for each in asked for node in each.inventory.nodes}
    found: list[Grant] = []
    failed: DriverError | None = None
    for names in vendors.values() if has or opened else ():
        vendor = contract.load(names)
        try:
            inventory = inventories.get(names.NAME) or cache.get_inventory(config, vendor)
        except NoDriverError:  # no container has devices of it
            continue
        except DriverError as error:
            failed = error
            continue
        nodes = {node.numbers for node in inventory.nodes}
        explained |= nodes
        allowed = access.openable(rules, nodes) if opened else set()
        before = ours.get(names.NAME, ())
        has_already = {name for device in before for name in (device.id, device.parent)}
        given = spec_devices.devices_of(has | allowed, inventory)  # protects: limit-by-rule
        more = [device for device in given if device.id not in has_already]
        if more:
            found.append(_grant(vendor, inventory, more))
    if failed is not None:
        _check_unknown((has | opened) - explained, failed)  # protects: limit-failing-driver
    return found


def _check_unknown(numbers: "set[tuple[int, int]]", error: DriverError) -> None:
    """Refuse a container with a device that may belong to a failing driver; MemoryLimitError."""
    unknown = sorted(pair for pair in numbers if pair[0] not in spec_devices.SYSTEM)
    if unknown:
        raise MemoryLimitError(
            f"It is unknown whether the memory of the container's device {unknown[0][0]}:"
            f"{unknown[0][1]} must be limited: {error.cause}",
            error.remedy,
        )


def _grant(vendor: "Vendor", inventory: "Inventory", devices: "Iterable[Device]") -> "Grant":
    """Return a grant of devices that weren't requested from gpuhook."""
    return contract.Grant(vendor, Request(vendor.names.NAME), inventory, tuple(devices))

"""Requests for exclusive devices: a container's record, written before it gets anything.

It has the requested devices and those whose nodes are in config.json, regardless of who added
them and by which name: a CDI spec of another kind can't give a device a second time. ``leases``
decides whether a record is valid, and which container has a device now.
"""

import os

from gpuhook.base.cgroup import access
from gpuhook.base.errors import CdiError, DriverError
from gpuhook.base.oci.spec import ContainerState
from gpuhook.core import contract, spec_devices
from gpuhook.core.inventory.cache import get_inventory
from gpuhook.core.records import leases, records
from gpuhook.core.request.reader import is_privileged

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, Protocol

    from gpuhook.base.config.model import Config
    from gpuhook.base.container.changes import ContainerRootfs
    from gpuhook.base.oci.spec import Spec
    from gpuhook.core.contract import Grant, VendorRegistry
    from gpuhook.core.inventory.model import Inventory
    from gpuhook.core.records.choice import ChoiceContext

    Numbers = tuple[int, int]  # major and minor

    class AllocatedDevices(Protocol):
        """A container's devices: ``core.resolve.Allocation``."""

        grants: list[Grant]
        cdi_devices: tuple[str, ...]
        chosen: tuple[str, ...]
        start: ChoiceContext | None

    class DeviceLimits(Protocol):
        """Memory limits of a container's devices: ``core.memory_limits.MemoryLimits``."""

        def set(self, process: int, *, container: "ContainerRootfs") -> None:
            """Set all limits; MemoryLimitError."""

        def to_json(self) -> list[dict[str, Any]]:
            """Return them as recorded."""

# What a container has ---------------------------------------------------------------------------


def describe(
    state: "ContainerState",
    spec: "Spec",
    grants: "Sequence[Grant]",
    names: "Sequence[str]",
    vendors: "VendorRegistry",
    config: "Config",
    *,
    save: bool = True,
    chosen: tuple[str, ...] = (),
) -> "dict[str, Any]":
    """Return the record of a container, with all its devices of exclusive kinds.

    ``spec`` includes the edits of CDI specs; ``names`` are the CDI devices that were requested.
    Devices of a supported vendor are identified by their nodes: a CDI spec's 0 need not be ours.
    For other kinds the record has the names, and the nodes that belong to one device only.
    ``vendors`` are the registered vendors, ``chosen`` further kinds of devices. A newly made
    inventory is saved only with ``save``.
    """
    record = records.describe(state, spec.data.get("annotations"), grants)
    given = _given(spec, names, config)
    documents = [name for name in names if name.partition("=")[0] in config.exclusive]
    record["nodes"] = {}
    for kind in dict.fromkeys((*config.exclusive, *chosen)) if given else ():  # protects: claims
        ours = _inventory(kind, grants, vendors, config, save)
        if ours is None:
            record["nodes"][kind] = _of_documents(kind, given, config)
            continue
        has = given.among({node.numbers for node in ours[1].nodes})
        if found := spec_devices.devices_of(has, ours[1]):
            rules = sorted(access.allowed(spec.device_rules, has))
            _add(record, records.given(*ours, found, rules))
            documents = [name for name in documents if name.partition("=")[0] != kind]
    return {**record, "documents": documents}


class _DeviceAccess:
    """Character devices that a container is given: by nodes, and by rules of its cgroup."""

    def __init__(self, nodes: "set[Numbers]", rules: "list[dict[str, Any]]") -> None:
        self._nodes = nodes
        self._rules = rules

    def __bool__(self) -> bool:
        return bool(self._nodes or self._rules)

    def among(self, numbers: "set[Numbers]") -> "set[Numbers]":
        """Return which of these it has. It can create a node that a rule allows."""
        allowed = access.openable(self._rules, numbers)
        return (numbers & self._nodes) | allowed  # protects: claimed-rule


def _given(spec: "Spec", names: "Sequence[str]", config: "Config") -> _DeviceAccess:
    """Return what a container is given.

    If a privileged container may open every device, only devices from CDI specs count.
    """
    rules = [*spec_devices.objects(spec.device_rules)]
    # protects: claimed-unprivileged
    if not (is_privileged(spec.data) and any(map(spec_devices.allows_all, rules))):
        nodes = spec_devices.numbers(spec.data, os.path.dirname(spec.path))
        return _DeviceAccess(nodes, rules if spec_devices.opened(rules) else [])
    if not names:
        return _DeviceAccess(set(), [])
    from gpuhook.core.cdi import apply, parse_cache  # noqa: PLC0415 - only for such containers

    edits = apply.resolve(parse_cache.read_folders(config), names)
    return _DeviceAccess(spec_devices.numbers(apply.apply({}, edits)), [])


def _inventory(
    kind: str, grants: "Sequence[Grant]", vendors: "VendorRegistry", config: "Config", save: bool
) -> "tuple[Any, Inventory] | None":
    """Return a vendor's names and inventory, None if the kind has none."""
    for grant in grants:
        if kind == grant.vendor.names.KIND:
            return grant.vendor.names, grant.inventory
    for names in vendors.values():
        if kind == names.KIND:
            try:
                return names, get_inventory(config, contract.load(names), save=save)
            except DriverError:
                return None
    return None


def _add(record: "dict[str, Any]", found: "dict[str, Any]") -> None:
    """Add the devices that a container has by nodes to its record; a part stands for its whole."""
    for place, given in enumerate(record["given"]):
        if given["vendor"] == found["vendor"]:
            parts = given["nodes"].keys() - {*given["selected"]}
            found["selected"] = [name for name in found["selected"] if name not in parts]
            alone = {**found["alone"], **given["alone"]}
            record["given"][place] = {**records.added(found, given), "alone": alone}
            return
    record["given"].append(found)


def _of_documents(kind: str, given: _DeviceAccess, config: "Config") -> dict[str, str]:
    """Return the nodes of a kind that only CDI specs describe, "MAJOR:MINOR", and their owners.

    A node is a device's own if the devices that have it contain each other, as ``all`` and
    aliases do. Nodes that belong to the kind as a whole don't count.
    """
    from gpuhook.core.cdi import apply, parse_cache  # noqa: PLC0415 - only for such kinds

    owners: dict[Numbers, list[tuple[int, str, set[Numbers]]]] = {}
    for name, device in parse_cache.read_folders(config).devices.items():
        if name.partition("=")[0] != kind:
            continue
        try:
            nodes = spec_devices.numbers(apply.apply({}, device.edits))
        except CdiError:  # a node that this host lacks, so no container has it
            continue
        for pair in given.among(nodes):
            owners.setdefault(pair, []).append((len(nodes), name, nodes))
    found = {}
    for pair, several in sorted(owners.items()):
        several.sort(key=lambda each: each[:2])
        if all(several[at][2] <= several[at + 1][2] for at in range(len(several) - 1)):
            found[f"{pair[0]}:{pair[1]}"] = several[0][1]
    return found


# Taking devices ---------------------------------------------------------------------------------


def check(
    spec: "Spec", resolved: "AllocatedDevices | None", vendors: "VendorRegistry", config: "Config"
) -> bool:
    """Tell whether a container has exclusive devices; HeldError if another one has one of them.

    An early check, before the low-level runtime is called, or if no container is started. Writing
    the record decides. ``resolved`` is None if the container requests nothing from gpuhook.
    """
    record = describe(ContainerState("", 0, "", None), spec, *_asked(resolved), vendors, config)
    device = leases.wants(record, config.exclusive)
    if not device:
        return False
    others = records.read_every(config.state_dir, device)
    start = resolved.start if resolved is not None and resolved.chosen else None
    if start is not None:  # its choice is among them
        others = [each for each in others if not start.owns(each)]
    leases.refuse(record, others, config.exclusive)
    return True


def take(
    container: "ContainerRootfs",
    state: "ContainerState",
    spec: "Spec",
    resolved: "AllocatedDevices | None",
    vendors: "VendorRegistry",
    config: "Config",
    limits: "DeviceLimits | None" = None,
) -> None:
    """Write the record of a container with devices in its config.json; set its limits.

    ``container`` is its root while it is being created. HeldError if another container has one of
    the devices, MemoryLimitError if a limit can't be set.
    """
    chosen = resolved.chosen if resolved is not None else ()
    record = describe(state, spec, *_asked(resolved), vendors, config, chosen=chosen)
    if limits is not None:
        record["limits"] = limits.to_json()
    process, exclusive = container.process, config.exclusive
    with records.RecordWriter(config.state_dir, process, record, exclusive=exclusive):
        if limits is not None:
            limits.set(process, container=container)


def _asked(resolved: "AllocatedDevices | None") -> "tuple[Sequence[Grant], tuple[str, ...]]":
    return ((), ()) if resolved is None else (resolved.grants, resolved.cdi_devices)

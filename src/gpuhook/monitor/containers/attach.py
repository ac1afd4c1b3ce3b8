"""Addition of devices to running containers, and their removal.

The container's record has the devices, so that ``repair``, ``list``, ``explain`` and exclusive
devices treat them like those from its start; ``attached`` says which can be removed again.
"""

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

from gpuhook.base import names as grammar
from gpuhook.base.config.model import Config
from gpuhook.base.errors import (
    ContainerError,
    GpuhookError,
    MemoryLimitError,
    RequestError,
    listed,
    shown,
)
from gpuhook.base.oci.spec import Spec
from gpuhook.core import contract, dev_char, memory_limits
from gpuhook.core.contract import Grant
from gpuhook.core.inventory.model import Device, Inventory
from gpuhook.core.inventory.selection import select
from gpuhook.core.records import leases
from gpuhook.core.resolve import Allocation, find_memory_limits
from gpuhook.monitor.containers import attached, live
from gpuhook.monitor.containers.nodes import Numbers
from gpuhook.monitor.containers.open_nodes import NodeUser
from gpuhook.monitor.containers.target import AttachTarget
from gpuhook.vendors import registry

_SHOWN = 4  # most processes or devices to name

Named = list[tuple[ModuleType, Inventory, list[Device]]]  # devices by vendor


class AttachResult(NamedTuple):
    """The devices and paths of nodes that a container got or lost, and warnings as sentences.

    ``lasts`` is False if systemd removes the access at its next daemon-reload.
    """

    devices: list[dict[str, str]]
    nodes: list[str]
    warnings: list[str]
    lasts: bool = True


def attach(
    container: AttachTarget, new: Sequence[Grant], request: Spec, config: Config
) -> AttachResult:
    """Give a running container devices, all of them or none; GpuhookError.

    ``new`` are the grants of the devices, ``request`` holds the limits that were asked for.
    """
    record = container.record()
    combined = [_with_former(grant, record) for grant in new]
    allocation = Allocation(combined, config, registry.all_vendors(config))
    limited = _memory_limits(request, allocation, new, config)
    rules = [container.denied(grant.rules()) for grant in combined]
    pairs = sorted({pair for each in rules for pair in each})
    entries = [
        entry
        for grant, each in zip(new, rules, strict=True)
        for entry in attached.entries(grant, each)
    ]
    ids = attached.ids_of({"attached": entries})

    def add(old: dict[str, Any], others: list[dict[str, Any]]) -> dict[str, Any]:
        if both := ids & attached.ids_of(old):
            raise has_already(container.id, [name for _, name in sorted(both)])
        found = attached.added(old, combined, entries)
        found["limits"] = [*old.get("limits", ()), *limited]
        leases.refuse(found, others, config.exclusive)  # protects: attach-lease
        return found

    container.change(add)
    try:
        if set_again := memory_limits.recorded(
            limited, container.inventories.values(), registry.all_vendors(config), config
        ):
            set_again.set(container.process, container.written)
        for grant in combined:
            dev_char.make_links([node for node, _ in grant.nodes], grant.inventory.root)
        lasts = container.allow(pairs)
        done = live.mount(container.first, allocation, container.spec.data, config)
    except BaseException:
        with contextlib.suppress(GpuhookError):
            container.deny(pairs)  # protects: attach-all-or-nothing
        with contextlib.suppress(GpuhookError):  # a killed child rolls nothing back
            every = [node for grant in combined for node, _ in grant.nodes]
            left = {each.inside or each.path: each.numbers for each in every}
            live.unmount(
                container.first, {path: pair for path, pair in left.items() if pair in pairs}
            )
        _forget(container, ids, pairs, config)
        raise
    nodes = [each["destination"] for each in done["operations"] if each["kind"] == "device"]
    container.change(lambda old, _: attached.mounted(old, ids, nodes, lasts=lasts))
    later = [f"A running process can't get this, a new one may: {each}" for each in done["undone"]]
    warnings = [*allocation.warnings(), *done["skipped"], *later]
    return AttachResult(_described(new), nodes, warnings, lasts)


def detach(
    container: AttachTarget, words: Sequence[str], config: Config, *, force: bool
) -> AttachResult:
    """Take attached devices away from a running container; ContainerError while one is in use.

    With ``force`` processes keep what they have open, unless the devices are exclusive.
    """
    vendors = registry.all_vendors(config)
    old = [
        Grant.of_document(contract.load(names), inventory, config, devices)
        for names, inventory, devices in named(words, container.inventories, config)
    ]
    ids = {(grant.vendor.names.NAME, name) for grant in old for name in grant.ids}
    record = container.record()
    if others := sorted(name for _, name in ids - attached.ids_of(record)):
        raise ContainerError(
            f"{listed(others, _SHOWN)} wasn't attached to {container.id}",
            "Stop the container to take away what it has from its start",
        )
    _, gone, places = attached.removed(record, ids, container.inventories, config)
    every = [node for grant in old for node in grant.inventory.nodes]
    nodes = {node.numbers: node.path for node in every if node.numbers in {*gone, *places}}
    is_denied = container.deny(gone)
    exclusive = {vendors[vendor].KIND for vendor, _ in ids}.intersection(config.exclusive)
    try:
        users = container.users(nodes)
        if users and (exclusive or not force):  # protects: detach-in-use
            raise _in_use(users, exclusive=bool(exclusive))
    except GpuhookError:
        container.allow(gone)
        raise
    paths = live.unmount(container.first, {path: pair for pair, path in places.items()})
    _forget(container, ids, gone, config)
    warnings = [f"{_process(each)} keeps {listed(each.nodes, _SHOWN)} open" for each in users]
    if places and not is_denied:
        warnings.append("Its cgroup allows the device as before, so it can make the node again")
    return AttachResult(_described(old), paths, warnings)


def _forget(
    container: AttachTarget, ids: set[tuple[str, str]], pairs: list[Numbers], config: Config
) -> None:
    """Remove attached devices from a container's record, and their nodes from its scope."""
    container.change(lambda old, _: attached.removed(old, ids, container.inventories, config)[0])
    container.forget(pairs)


def named(words: Iterable[str], inventories: Mapping[str, Inventory], config: Config) -> Named:
    """Return the devices that words mean: CDI names, or names of the host's only vendor."""
    vendors = registry.all_vendors(config)
    here = [vendors[vendor] for vendor in inventories]
    found: dict[str, list[str]] = {}
    for word in words:
        kind, equals, name = word.partition("=")
        fitting = [each for each in here if kind == each.KIND or not equals]
        if len(fitting) != 1 or (equals and grammar.cdi_parts(word) is None):
            kinds = listed([each.KIND for each in here])
            raise RequestError(
                f"It is unclear which device {shown(word)} is",
                f"Give KIND=NAME; this host has {kinds}",
            )
        found.setdefault(fitting[0].NAME, []).append(name if equals else word)
    return [
        (
            vendors[vendor],
            inventories[vendor],
            [*select(some, inventories[vendor], vendors[vendor])],
        )
        for vendor, some in found.items()
    ]


def has_already(container: str, devices: list[str]) -> ContainerError:
    """Return the error that a container has devices, by their labels."""
    return ContainerError(
        f"{container} has {listed(devices, _SHOWN)} already",
        "Name another device: see gpuhook list",
    )


def _with_former(grant: Grant, record: Mapping[str, Any]) -> Grant:
    """Return a grant of new devices together with those that the container has of the vendor."""
    name = grant.vendor.names.NAME
    ids = {one for each in record["given"] if each["vendor"] == name for one in each["selected"]}
    ids.update(grant.ids)
    devices = tuple(device for device in grant.inventory.devices if device.id in ids)
    whole = Grant(grant.vendor, grant.request, grant.inventory, devices)
    whole.vendor.check(whole)
    return whole


def _memory_limits(
    request: Spec, allocation: Allocation, new: Iterable[Grant], config: Config
) -> list[dict[str, Any]]:
    """Return the memory limits of new devices by the container's variables, for its record."""
    if config.limits_memory:  # protects: attach-limits
        raise MemoryLimitError(
            "This host limits the memory of devices, which is only safe at a container's start",
            "Stop the container and start it with the devices",
        )
    found = find_memory_limits(request, config, allocation.vendors, allocation)
    ids = {(grant.vendor.names.NAME, name) for grant in new for name in grant.ids}
    every = found.to_json() if found is not None else []
    return [each for each in every if (each["vendor"], each["id"]) in ids]


def _in_use(users: Sequence[NodeUser], *, exclusive: bool) -> ContainerError:
    named_users = listed([f"{_process(each)} ({each.nodes[0]})" for each in users], _SHOWN)
    how = "End them" if exclusive else "End them, or use --force, with which they keep it"
    return ContainerError(f"The device is in use by {named_users}", how)


def _process(user: NodeUser) -> str:
    return f"process {user.pid} ({user.command})"


def _described(grants: Iterable[Grant]) -> list[dict[str, str]]:
    return [
        {"vendor": grant.vendor.names.NAME, "id": device.id, "label": device.label}
        for grant in grants
        for device in grant.devices
    ]

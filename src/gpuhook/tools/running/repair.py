"""Repair of running containers whose cgroups no longer allow their devices.

``systemctl daemon-reload`` and ``docker update`` rewrite a container's device rules, and rules
that were only in the cgroup are lost: "Failed to initialize NVML: Unknown Error".

A container's devices come from the record of its injection (``records``), or from its config.json
if root owns that (``bundles``). Its /dev and its mounts are never trusted: a container with
CAP_MKNOD can create any node, and mount it in a user namespace.
"""

import contextlib
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from gpuhook.base.cgroup import access, dmem
from gpuhook.base.config.model import Config
from gpuhook.base.errors import ContainerError
from gpuhook.base.host import proc
from gpuhook.core import dev_char
from gpuhook.core.inventory.model import DeviceNode, Inventory
from gpuhook.core.memory_limits import recorded
from gpuhook.core.records import records
from gpuhook.monitor.containers import attached, cgroup_check
from gpuhook.monitor.containers.device_users import RunningContainer, believed
from gpuhook.monitor.containers.groups import group_of
from gpuhook.monitor.containers.nodes import Numbers
from gpuhook.tools.running import bundles
from gpuhook.tools.running.names import Names, meant
from gpuhook.vendors import registry

_SCOPE = ".scope"  # suffix of systemd's cgroups for processes that others started


class RepairResult(NamedTuple):
    """The restored access of a container.

    ``how`` is the result of ``access.allow``. ``nodes`` are those that its cgroup didn't allow,
    ``links`` the missing names in /dev/char that systemd needs. ``lasts`` is False if systemd will
    remove the access again, because only a hook added it and systemd has no rule for it.
    ``memory_limits`` are the devices whose recorded memory limit was lost and is set again.
    """

    how: str
    nodes: tuple[DeviceNode, ...]
    links: tuple[str, ...]
    lasts: bool
    memory_limits: tuple[str, ...] = ()


def repair(
    container: RunningContainer, inventories: Collection[Inventory], config: Config | None = None
) -> RepairResult:
    """Restore a container's access to its devices; return what was missing.

    With ``config``, its memory limits are set again as well. Raises CgroupError, MemoryLimitError,
    and ContainerError if its devices are unknown.
    """
    with _first_process(container) as process, _unchanged(container, config):
        given = given_devices(container, process, inventories)
        written = _written(container, process)
        missing = _nodes(cgroup_check.missing(process, given, written=written), inventories)
        how = access.allow(process, given, written=written)
        of_systemd = any(part.endswith(_SCOPE) for part in group_of(str(container.pid)).split("/"))
        lasting = attached.lasting(container.record or {})
        by_hook = [pair for pair in given if pair not in lasting]
        lasts = not of_systemd or _is_in_spec(container, process, by_hook)
        limited = (
            _restore_memory_limits(container, process, inventories, config)
            if config is not None
            else ()
        )
    links = [
        link
        for inventory in (inventories if of_systemd and lasts else ())
        for link in dev_char.make_links(_nodes(given, [inventory]), inventory.root)
    ]
    return RepairResult(how, missing, tuple(links), lasts, limited)


def _restore_memory_limits(
    container: RunningContainer, process: int, inventories: Iterable[Inventory], config: Config
) -> tuple[str, ...]:
    """Set a container's recorded limits that aren't in effect; return the devices."""
    entries = (container.record or {}).get("limits", ())
    if not entries:
        return ()
    written = _written(container, process)
    vendors = registry.all_vendors(config)
    inventories = list(inventories)
    limits = recorded(entries, inventories, vendors, config)
    tree, folder = dmem.place_of(process, written=written)
    now = limits.used(tree, [folder])[folder] if limits is not None else {}
    lost = [each for each in entries if not _holds(each, now)]
    again = recorded(lost, inventories, vendors, config)
    if again is not None:
        again.set(process, written)
    return tuple(each["device"] for each in lost)


def _holds(entry: dict[str, Any], now: Mapping[str, tuple[int, int | None]]) -> bool:
    limit = now.get(entry["id"], (0, None))[1]
    return limit is not None and limit <= entry["bytes"]


def _is_in_spec(container: RunningContainer, process: int, given: list[Numbers]) -> bool:
    """Tell whether the container's config.json allows its devices, or can't be found."""
    try:
        started = records.started(process)
    except OSError:
        raise _ended(container) from None
    allowed = bundles.allowed_devices(container.pid, started, given)
    return allowed is None or {*given} <= {*allowed}


def missing(
    container: RunningContainer, inventories: Collection[Inventory]
) -> tuple[DeviceNode, ...]:
    """Return the nodes that ``repair`` would restore; raises the same errors."""
    with _first_process(container) as process:
        given = given_devices(container, process, inventories)
        written = _written(container, process)
        return _nodes(cgroup_check.missing(process, given, written=written), inventories)


def _written(container: RunningContainer, process: int) -> dict[int, str]:
    """Return a container's recorded cgroups by version; empty means its current cgroup.

    A container can move its processes to cgroups that it can write to, with any name. If the
    record has no cgroups (from an earlier version, or written in a cgroup namespace), the current
    cgroup is used if its name contains the container's. Raises ContainerError otherwise.
    """
    if container.record is None:
        return {}
    found = records.cgroups_of(container.record)
    if found:
        return found
    try:
        now = access.places(proc.read("cgroup", process))
    except OSError:
        raise _ended(container) from None
    if all(any(container.name in part for part in path.split("/")) for path in now.values()):
        return {}
    raise ContainerError(
        f"The cgroup in which {container.name} got its devices is unknown, and the cgroup of "
        "its first process isn't named after it",
        "Stop the container and start it again",
    )


@contextlib.contextmanager
def _first_process(container: RunningContainer) -> Iterator[int]:
    """Hold a descriptor of /proc/PID of a container's first process."""
    try:
        process = os.open(f"/proc/{container.pid}", os.O_PATH | os.O_CLOEXEC)
    except OSError:
        raise _ended(container) from None
    try:
        yield process
    finally:
        os.close(process)


@contextlib.contextmanager
def _unchanged(container: RunningContainer, config: Config | None) -> Iterator[None]:
    """Prevent that attached devices are detached meanwhile; ContainerError if they just were."""
    record = container.record or {}
    folder = None
    if config is not None and record.get("attached"):
        folder = records.open_records(config.state_dir, make=False)
    if folder is None:
        yield
        return
    with folder, attached.one_at_a_time(folder):
        every = records.read_folder(folder, [])
        now = [each.get("attached") for each in every if _same(each, record)]
        if now != [record["attached"]]:  # protects: repair-attached
            raise ContainerError(
                f"The devices of {container.name} have just changed", "Run this again"
            )
        yield


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return records.name_of(one) == records.name_of(other)


def _nodes(wanted: Iterable[Numbers], inventories: Iterable[Inventory]) -> tuple[DeviceNode, ...]:
    numbers = {*wanted}
    every = {node.numbers: node for inventory in inventories for node in inventory.nodes}
    return tuple(node for pair, node in every.items() if pair in numbers)


def given_devices(
    container: RunningContainer, process: int, inventories: Collection[Inventory]
) -> list[Numbers]:
    """Return a container's devices, limited to those that this host has now.

    ``process`` is a descriptor of /proc/PID of its first process.
    """
    try:
        started = records.started(process)
    except OSError:
        raise _ended(container) from None
    present = {node.numbers for inventory in inventories for node in inventory.nodes}
    if container.record is None:
        allowed = bundles.allowed_devices(container.pid, started, present)
        if not allowed:
            raise ContainerError(
                f"{container.name} has no record of its devices, and no config.json that "
                "allows it a device",
                "Start it again: its GPUs were added by other software, or by a version of "
                "gpuhook without records",
            )
        return allowed
    if started != container.record["started"]:  # protects: another-process
        raise _ended(container)
    _check_devices(container, inventories)
    return sorted(container.nodes & present)  # protects: repair-record


def _check_devices(container: RunningContainer, inventories: Iterable[Inventory]) -> None:
    """Refuse if a device has other numbers than when the container got it."""
    found = moved(container, inventories)
    if found:
        raise ContainerError(
            f"{container.name} uses {', '.join(found)}, which this host no longer has, or "
            "has under another number",
            "Start it again",
        )


def moved(container: RunningContainer, inventories: Iterable[Inventory]) -> list[str]:
    """Return the devices in a container's record that have changed numbers, or are gone."""
    now: dict[tuple[str, str], list[list[int]]] = {}  # by vendor and id
    for inventory in inventories:
        numbers = {node.path: list(node.numbers) for node in inventory.nodes}
        for device in inventory.devices:
            found = [numbers[path] for path in device.nodes if path in numbers]
            now[inventory.vendor, device.id] = found
    return [
        name
        for one in (container.record or {})["given"]
        for name, nodes in one["nodes"].items()
        if now.get((one["vendor"], name)) != nodes
    ]


def _ended(container: RunningContainer) -> ContainerError:
    return ContainerError(
        f"The first process of {container.name} has exited", "Start the container again"
    )


def select(
    words: Iterable[str], running: Collection[RunningContainer], names: Names
) -> list[RunningContainer]:
    """Return the containers for words: ids, starts of ids, or engines' names.

    Raises ContainerError for a word that matches none of them, or several.
    """
    chosen = []
    running = believed(running)
    called = {each.name: names.of(each.name)[0] for each in running}
    for name in words:
        found = [each for each in running if each.name in meant(name, called)]
        if len(found) != 1:
            what = "matches several containers" if found else "isn't a running container with a GPU"
            raise ContainerError(
                f"{name} {what}",
                "Use an id or name as `gpuhook list` or the engine shows it, or --all",
            )
        chosen += found
    return chosen

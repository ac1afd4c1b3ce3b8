"""Devices of running containers, from our records, else from mounts and device nodes.

A container with injected devices has a record (``records``). Any other container is a set of
processes with its own root filesystem. Its mount table shows the host's device nodes in it
(``nodes``), and its cgroup identifies it (``groups``).
"""

import os
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gpuhook.base.errors import listed
from gpuhook.base.host import proc
from gpuhook.core.inventory.model import Inventory
from gpuhook.core.records import records
from gpuhook.monitor.containers.groups import (
    ContainerIdentity,
    RootCgroups,
    groups_of,
    identify,
    own_path,
    path_of,
)
from gpuhook.monitor.containers.nodes import HostNodes, Numbers, has_our_root, nodes_of
from gpuhook.monitor.host.namespaces import PATIENCE, NamespaceScan, mounts_of

WITHOUT_ROOT = (
    "Without root, only your own containers are listed, and those of a Docker that you can access; "
    "run this as root for all."
)
MAX_CONTAINERS = 512  # most containers without a record to show
_LATE = (
    "Containers without a record may be missing: the host's processes have more mounts than "
    f"can be examined in {PATIENCE:.0f} seconds"
)
_UNSEEN = (
    "Containers outside of this pid namespace may have devices, and aren't visible here; run "
    "this in the host's pid namespace (--pid=host) for all"
)
_UNCLEAR = (
    "The devices of these processes are unknown until they are restarted, because their records "
    f"are damaged or of another version, in the folder {records.FOLDER} of"
)
_MANY = f"There are more than {MAX_CONTAINERS} containers without a record: the others are left out"


@dataclass
class RunningContainer:
    """A running container.

    ``name`` is its id, ``engine`` its engine ("" if unknown), ``pid`` its first process,
    ``command`` that process's name, ``nodes`` its devices. ``pod``, ``namespace`` and
    ``container`` are Kubernetes' names for it. ``record`` is the record of its injection, None
    without one. ``is_asked`` is true if only its engine reports its devices (``docker_inspect``).
    """

    name: str
    engine: str
    pid: int
    command: str
    nodes: set[Numbers] = field(default_factory=set)
    pod: str = ""
    namespace: str = ""
    container: str = ""
    record: dict[str, Any] | None = None
    is_asked: bool = False

    @property
    def bundle(self) -> str:
        """The folder with its config.json, "" if unknown."""
        return str((self.record or {}).get("bundle", ""))

    @property
    def cgroups(self) -> dict[int, str]:
        """Its recorded cgroups by version, as far as known."""
        return records.cgroups_of(self.record or {})

    @property
    def cdi_devices(self) -> list[str]:
        """Its devices that only CDI specs describe."""
        return list((self.record or {}).get("documents", ()))

    @property
    def known_from(self) -> str:
        """The source of its list of devices: "record", "nodes" or "engine"."""
        if self.record is not None:
            return "record"
        return "engine" if self.is_asked else "nodes"

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object of `gpuhook list --format json`."""
        return {
            "name": self.name,
            "engine": self.engine,
            "pid": self.pid,
            "command": self.command,
            "nodes": sorted(self.nodes),
            "pod": self.pod,
            "namespace": self.namespace,
            "container": self.container,
            "cdi_devices": self.cdi_devices,
            "attached": [each["device"] for each in (self.record or {}).get("attached", ())],
            "known_from": self.known_from,
        }


class RunningContainers(NamedTuple):
    """The running containers that have devices, by their ids.

    ``problems`` are sentences on missing information.
    """

    containers: list[RunningContainer]
    problems: tuple[str, ...]


def running(inventories: Iterable[Inventory], state_dir: str) -> RunningContainers:
    """Return the containers that have one of the host's devices.

    Inaccessible processes (those of other users, without root) are left out.
    """
    look = NamespaceScan()
    unclear: list[str] = []
    recorded = [of_record(record) for record in records.read_all(state_dir, unclear)]
    host = HostNodes(inventories)
    found: dict[ContainerIdentity, RunningContainer] = {}
    for entry, identity in _by_turns(_others(recorded, look)):
        if not look.goes_on():  # protects: look-ends
            break
        try:
            nodes = {*nodes_of(entry, host, look)}
        except OSError:
            continue  # it has exited, or isn't accessible
        if nodes:
            made = RunningContainer(identity.name, identity.engine, int(entry), command_of(entry))
            found.setdefault(identity, made).nodes |= nodes  # protects: each-identity
    others = [*found.values()]
    problems = (
        _LATE if not look.is_whole else "",
        _MANY if len(others) > MAX_CONTAINERS else "",
        f"{_UNCLEAR} {state_dir}: {listed(unclear)}" if unclear else "",
        _UNSEEN if records.are_unseen(state_dir) else "",  # protects: unseen-told
    )
    # protects: look-limit
    containers = sorted([*recorded, *others[:MAX_CONTAINERS]], key=lambda each: each.name)
    return RunningContainers(containers, tuple(each for each in problems if each))


_Other = tuple[str, ContainerIdentity]  # a process and its container


def _others(recorded: Collection[RunningContainer], look: NamespaceScan) -> Iterator[_Other]:
    """Yield a process of each mount namespace, except ours and those of recorded containers."""
    known = {mounts_of(each.pid) for each in recorded} | {mounts_of("self")}
    ours, made = groups_of("self"), RootCgroups()
    groups = {path_of(each.cgroups, groups_of(each.pid), ours) for each in recorded} - {"/"}
    for namespace, entries in look.namespaces().items():
        for entry in entries if namespace not in known else ():
            if not look.goes_on():
                return
            theirs = groups_of(entry)
            if theirs and not _is_below(own_path(theirs, ours), groups) and _has_own_root(entry):
                yield entry, identify(made.of(theirs), ours)
                break


def _has_own_root(entry: str) -> bool:
    """Tell whether a process has another root than ours, as far as that is visible.

    A process that waits for a container's program may be in its mount namespace with our root.
    """
    try:
        return not has_our_root(entry)  # protects: own-root
    except OSError:
        return False


def _by_turns(others: Iterable[_Other]) -> list[_Other]:
    """Return the processes in turns, one of each container, then the next of each.

    So a container with a thousand namespaces leaves time for the others.
    """
    turns: dict[ContainerIdentity, int] = {}
    found = []
    for entry, identity in others:
        turns[identity] = turns.get(identity, 0) + 1
        found.append((turns[identity], entry, identity))
    found.sort(key=lambda each: each[0])  # protects: everybodys-first
    return [(entry, identity) for _, entry, identity in found]


def of_record(record: dict[str, Any]) -> RunningContainer:
    """Return the container of a record."""
    nodes = {(major, minor) for given in record["given"] for major, minor in given["devices"]}
    pid = record["pid"]
    names = (record["pod"], record["namespace"], record["container"])
    name, engine = record["id"], record["engine"]
    if not name:  # written by nvidia-container-cli, which doesn't get it
        name, engine, _ = identify(RootCgroups().of(groups_of(pid)), groups_of("self"))
    command = command_of(pid)
    return RunningContainer(name, engine, pid, command, nodes, *names, record)


def whole_nodes(inventory: Inventory) -> dict[str, set[Numbers]]:
    """Return the numbers of each device's nodes, by device id, if all of the nodes exist.

    A container that has all of them has the device, or one that contains it.
    """
    there = {node.path: node.numbers for node in inventory.nodes}
    return {
        device.id: {there[path] for path in device.nodes}
        for device in inventory.devices
        if device.nodes and all(path in there for path in device.nodes)
    }


def _is_below(group: str, groups: Collection[str]) -> bool:
    """Tell whether a cgroup is one of some others, or below one."""
    while group and group not in groups:
        group = group.rpartition("/")[0]
    return bool(group)


def command_of(entry: str | int) -> str:
    """Return a process' name, "" if it is gone."""
    return os.fsdecode(proc.data_of(f"/proc/{entry}/comm").removesuffix(b"\n"))


def without_record(containers: Iterable[RunningContainer]) -> list[RunningContainer]:
    """Return the containers without a record."""
    return [each for each in containers if each.record is None]


def believed(containers: Collection[RunningContainer]) -> list[RunningContainer]:
    """Return the containers, except those without a record that have a recorded one's name.

    A user with a delegated cgroup can give a cgroup the name of another user's container.
    """
    recorded = {each.name for each in containers if each.record is not None}
    return [each for each in containers if each.record is not None or each.name not in recorded]

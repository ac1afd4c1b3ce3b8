"""Which running container has which device: from our records, else from its mounts and nodes.

A container that was injected has a record (``records``). Of another one, a set of processes
with a root filesystem of their own, the kernel's list of its mounts says which nodes of the
host are mounted in it (``nodes``), and its cgroup which container it is (``groups``).
"""

import os
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gpuhook.ground.errors import listed
from gpuhook.ground.host import proc
from gpuhook.start.inventory.model import Inventory
from gpuhook.start.records import records
from gpuhook.tools.host.namespaces import PATIENCE, Look, mounts_of
from gpuhook.tools.running.groups import Identity, Made, groups_of, identify, own_path, path_of
from gpuhook.tools.running.nodes import HostNodes, Numbers, has_our_root, nodes_of

WITHOUT_ROOT = (
    "Without root only your own containers are seen, and those of a Docker that you may ask; "
    "run this as root for all."
)
LIMIT = 512  # containers without a record that are shown
_LATE = (
    "Containers without a record may be missing: the machine's processes have more mounted than "
    f"can be looked at in {PATIENCE:.0f} seconds"
)
_UNSEEN = (
    "Containers outside of this pid namespace may have devices, and can't be seen from here; start "
    "this in the machine's (--pid=host) for all"
)
_UNCLEAR = (
    "What these processes were given isn't known until they are started again, because their "
    f"records are damaged or another version's, in the folder {records.FOLDER} of"
)
_MANY = f"There are more than {LIMIT} containers without a record: the others are left out"


@dataclass
class Container:
    """A running container.

    ``name`` is its id, ``engine`` who started it ("" unknown), ``pid`` its first process,
    ``command`` that one's name, ``nodes`` the devices that it was given. ``pod``,
    ``namespace`` and ``container`` are Kubernetes' names for it. ``record`` is what was
    written down when it was injected, None for one that was only looked at. ``is_asked`` where
    its engine alone says what it was started with (``of_docker``).
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
        """The folder with its config.json, "" where that isn't known."""
        return str((self.record or {}).get("bundle", ""))

    @property
    def cgroups(self) -> dict[int, str]:
        """The cgroups by version that it was given, as far as is known."""
        return records.cgroups_of(self.record or {})

    @property
    def cdi_devices(self) -> list[str]:
        """The devices that it holds and that documents alone describe."""
        return list((self.record or {}).get("documents", ()))

    @property
    def known_from(self) -> str:
        """What says which devices it has: "record", "nodes" or "engine"."""
        if self.record is not None:
            return "record"
        return "engine" if self.is_asked else "nodes"

    def to_json(self) -> dict[str, Any]:
        """Return it as `gpuhook list --format json` shows it."""
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
            "known_from": self.known_from,
        }


class Running(NamedTuple):
    """The running containers that have devices, by their ids.

    ``problems`` are sentences on what is missing.
    """

    containers: list[Container]
    problems: tuple[str, ...]


def running(inventories: Iterable[Inventory], state_dir: str) -> Running:
    """Return the containers that have one of the machine's devices.

    Processes that may not be looked at (those of others, without root) are left out.
    """
    look = Look()
    unclear: list[str] = []
    recorded = [of_record(record) for record in records.read_all(state_dir, unclear)]
    host = HostNodes(inventories)
    found: dict[Identity, Container] = {}
    for entry, identity in _by_turns(_others(recorded, look)):
        if not look.goes_on():  # protects: look-ends
            break
        try:
            nodes = {*nodes_of(entry, host, look)}
        except OSError:
            continue  # it has ended, or it isn't for us to see
        if nodes:
            made = Container(identity.name, identity.engine, int(entry), command_of(entry))
            found.setdefault(identity, made).nodes |= nodes  # protects: each-identity
    others = [*found.values()]
    problems = (
        _LATE if not look.is_whole else "",
        _MANY if len(others) > LIMIT else "",
        f"{_UNCLEAR} {state_dir}: {listed(unclear)}" if unclear else "",
        _UNSEEN if records.are_unseen(state_dir) else "",  # protects: unseen-told
    )
    # protects: look-limit
    containers = sorted([*recorded, *others[:LIMIT]], key=lambda each: each.name)
    return Running(containers, tuple(each for each in problems if each))


_Other = tuple[str, Identity]  # a process, and which container it is in


def _others(recorded: Collection[Container], look: Look) -> Iterator[_Other]:
    """Yield a process of each mount namespace that is neither ours nor of a recorded container."""
    known = {mounts_of(each.pid) for each in recorded} | {mounts_of("self")}
    ours, made = groups_of("self"), Made()
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
    """Tell whether a process has another root than we, as far as that may be seen.

    One that waits for a container's program may be in its mounts, with the host's root.
    """
    try:
        return not has_our_root(entry)  # protects: own-root
    except OSError:
        return False


def _by_turns(others: Iterable[_Other]) -> list[_Other]:
    """Return them with one of each container first, then the next of each.

    Where one has a thousand namespaces, there is time for the others.
    """
    turns: dict[Identity, int] = {}
    found = []
    for entry, identity in others:
        turns[identity] = turns.get(identity, 0) + 1
        found.append((turns[identity], entry, identity))
    found.sort(key=lambda each: each[0])  # protects: everybodys-first
    return [(entry, identity) for _, entry, identity in found]


def of_record(record: dict[str, Any]) -> Container:
    """Return the container that a record is of."""
    nodes = {(major, minor) for given in record["given"] for major, minor in given["devices"]}
    pid = record["pid"]
    names = (record["pod"], record["namespace"], record["container"])
    name, engine = record["id"], record["engine"]
    if not name:  # written by nvidia-container-cli, which isn't told
        name, engine, _ = identify(Made().of(groups_of(pid)), groups_of("self"))
    command = command_of(pid)
    return Container(name, engine, pid, command, nodes, *names, record)


def whole_nodes(inventory: Inventory) -> dict[str, set[Numbers]]:
    """Return the numbers of each device's nodes, by its id, where all of them are there.

    A container that has them all has the device, or one that it is a part of.
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
    """Return what a process calls itself, "" if it is gone."""
    return os.fsdecode(proc.data_of(f"/proc/{entry}/comm").removesuffix(b"\n"))


def without_record(containers: Iterable[Container]) -> list[Container]:
    """Return those of the containers that were only looked at."""
    return [each for each in containers if each.record is None]


def believed(containers: Collection[Container]) -> list[Container]:
    """Return the containers but those that were only looked at and are called like a recorded one.

    Any user who may make cgroups can call one like somebody else's container.
    """
    recorded = {each.name for each in containers if each.record is not None}
    return [each for each in containers if each.record is not None or each.name not in recorded]

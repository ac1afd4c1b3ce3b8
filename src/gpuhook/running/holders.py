"""Which running container has which device: from our records, else from its mounts and nodes.

A container that was injected has a record (``records``). Of another one, a set of processes
with a root filesystem of their own, the kernel's list of its mounts says which nodes of the
host are mounted in it; its /dev is looked at only where that can't wait for a filesystem
that somebody else serves (FUSE).
"""

import contextlib
import itertools
import os
import re
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from gpuhook.container import kernel
from gpuhook.container.rootfs import Rootfs
from gpuhook.host import proc
from gpuhook.inventory.model import Inventory
from gpuhook.running import records

WITHOUT_ROOT = "Without root only your own containers are seen; run this as root for all."
_ID = re.compile(r"[0-9a-f]{64}")
_ENGINES = (
    ("libpod", "podman"),
    ("crio", "cri-o"),
    ("kubepods", "kubernetes"),
    ("cri-containerd", "kubernetes"),
    ("docker", "docker"),
)
_NODES_LIMIT = 1 << 14  # entries of a container's /dev that are looked at
# Filesystems of the kernel's own, whose answers wait for nobody else.
_LOCAL = frozenset(
    {
        b"overlay",
        b"ext4",
        b"xfs",
        b"btrfs",
        b"zfs",
        b"f2fs",
        b"tmpfs",
        b"devtmpfs",
        b"squashfs",
        b"erofs",
    }
)

Numbers = tuple[int, int]  # of a device: major, minor


@dataclass
class Container:
    """A running container.

    ``name`` is its id, ``engine`` who started it ("" unknown), ``pid`` its first process,
    ``command`` that one's name, ``nodes`` the devices that it was given. ``pod``,
    ``namespace`` and ``container`` are Kubernetes' names for it. ``record`` is what was
    written down when it was injected, None for one that was only looked at.
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

    @property
    def bundle(self) -> str:
        """The folder with its config.json, "" where that isn't known."""
        return str((self.record or {}).get("bundle", ""))

    @property
    def cdi_devices(self) -> list[str]:
        """The devices that it holds and that documents alone describe."""
        return list((self.record or {}).get("documents", ()))

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
            "known_from": "nodes" if self.record is None else "record",
        }


def running(inventories: Iterable[Inventory], state_dir: str) -> list[Container]:
    """Return the containers that have one of the machine's devices, by their ids.

    Processes that may not be looked at (those of others, without root) are left out.
    """
    recorded = [of_record(record) for record in records.read_all(state_dir)]
    seen = {namespace for each in recorded if (namespace := _mounts_of(str(each.pid)))}
    our_groups = cgroups_of("self")
    groups = {_group(cgroups_of(each.pid), our_groups) for each in recorded} - {""}
    host = _HostNodes(inventories)
    found: dict[str, Container] = {}
    ours, our_root = _mounts_of("self"), _root_of("self")
    for entry in sorted((name for name in os.listdir("/proc") if name.isdecimal()), key=int):
        namespace = _mounts_of(entry)
        if not namespace or namespace in seen or namespace == ours:
            continue
        try:
            cgroups = cgroups_of(entry)
            if _is_below(_group(cgroups, our_groups), groups) or _root_of(entry) == our_root:
                continue
            seen.add(namespace)
            _note(found, entry, identify(cgroups, our_groups), host)
        except (OSError, IndexError):
            continue  # it has ended, or it isn't for us to see
    others = [each for each in found.values() if each.nodes]
    return sorted([*recorded, *others], key=lambda each: each.name)


def of_record(record: dict[str, Any]) -> Container:
    """Return the container that a record is of."""
    nodes = {(major, minor) for given in record["given"] for major, minor in given["devices"]}
    pid = record["pid"]
    names = (record["pod"], record["namespace"], record["container"])
    name, engine = record["id"], record["engine"]
    if not name:  # written by nvidia-container-cli, which isn't told
        name, engine = identify(cgroups_of(pid), cgroups_of("self"))
    command = command_of(pid)
    return Container(name, engine, pid, command, nodes, *names, record)


def _mounts_of(entry: str) -> str:
    """Return the name of a process' mount namespace, "" where it isn't for us to know."""
    try:
        return os.readlink(f"/proc/{entry}/ns/mnt")
    except OSError:
        return ""


def _root_of(entry: str) -> tuple[bytes, ...]:
    """Return what is mounted on a process' root: the filesystem and the path in it.

    From the mount table, because to ask the root itself is to ask whoever serves it.
    """
    roots = [(mount.device, mount.root) for mount in _mounts(entry) if mount.point == b"/"]
    return roots[-1] if roots else ()


def group_of(entry: str) -> str:
    """Return the cgroup that tells which container a process belongs to, "" if none does."""
    return _group(cgroups_of(entry), cgroups_of("self"))


def _group(cgroups: Mapping[str, str], ours: Mapping[str, str]) -> str:
    found = own_path(cgroups, ours)
    return "" if found == "/" else found


def _is_below(group: str, groups: Collection[str]) -> bool:
    """Tell whether a cgroup is one of some others, or below one."""
    while group and group not in groups:
        group = group.rpartition("/")[0]
    return bool(group)


def _note(
    found: dict[str, Container], entry: str, identity: tuple[str, str], host: "_HostNodes"
) -> None:
    name, engine = identity
    container = found.get(name)
    if container is None:
        container = found[name] = Container(name, engine, int(entry), command_of(entry))
    container.nodes |= set(_nodes(entry, host))


def data_of(path: str) -> bytes:
    """Return a file of /proc, b"" where it is gone or isn't for us to read."""
    try:
        return proc.read(path)
    except OSError:
        return b""


def cgroups_of(entry: str | int) -> dict[str, str]:
    """Return a process' cgroups by their controllers, none where they aren't for us to read."""
    return proc.cgroups(data_of(f"/proc/{entry}/cgroup"))


def command_of(entry: str | int) -> str:
    """Return what a process calls itself, "" if it is gone."""
    return os.fsdecode(data_of(f"/proc/{entry}/comm").removesuffix(b"\n"))


def identify(cgroups: Mapping[str, str], ours: Mapping[str, str]) -> tuple[str, str]:
    """Return (container id, engine) from a process' cgroups; ``ours`` are our own.

    The id is the 64 hex digits that engines use: the outermost ones, because a container
    can call its own cgroups what it likes. Else it is the last part of the path.
    """
    path = own_path(cgroups, ours)
    engine = next((name for word, name in _ENGINES if word in path), "")
    ids = _ID.findall(path)
    if ids:
        return ids[0], engine
    return path.rpartition("/")[2].removesuffix(".scope") or "/", engine


def own_path(cgroups: Mapping[str, str], ours: Mapping[str, str]) -> str:
    """Return a process' cgroup, where it isn't our own: the devices', the unified one, or any."""
    own = {key: path for key, path in cgroups.items() if path != ours.get(key, "/")}
    preferred = sorted(own, key=lambda key: ("devices" not in key.split(","), key != ""))
    return own[preferred[0]] if preferred else "/"


class _HostNodes:
    """The nodes of the driver roots, and where they would be in a mount table."""

    def __init__(self, inventories: Iterable[Inventory]) -> None:
        self.numbers: set[Numbers] = set()
        self.by_place: dict[tuple[bytes, str], Numbers] = {}
        self.folders = {"."}
        for inventory in inventories:
            for node in inventory.nodes:
                self.numbers.add(node.numbers)
                self.folders.add(os.path.dirname(node.inside or node.path)[len("/dev/") :] or ".")
            self.by_place.update(self._places(inventory))

    def _places(self, inventory: Inventory) -> Iterator[tuple[tuple[bytes, str], Numbers]]:
        """Yield ((filesystem, path in it), numbers) as proc_pid_mountinfo(5) has them."""
        table = _mounts("self")
        with Rootfs(inventory.root) as root:
            for node in inventory.nodes:
                try:
                    fd = root.open(node.path)
                except OSError:
                    continue
                try:
                    path = os.readlink(f"/proc/self/fd/{fd}")
                    mount = table.find(b"%d" % kernel.mount_id(fd))
                finally:
                    os.close(fd)
                if mount is not None:
                    below = path.removeprefix(proc.unescaped(mount.point).rstrip("/"))
                    place = proc.unescaped(mount.root).rstrip("/") + below
                    yield (mount.device, place), node.numbers


def _mounts(entry: str) -> proc.Mounts:
    return proc.Mounts(data_of(f"/proc/{entry}/mountinfo"))


def _nodes(entry: str, host: _HostNodes) -> Iterator[Numbers]:
    """Yield the numbers of the host's nodes that a process has mounted, or in its /dev."""
    kinds = {}
    for mount in _mounts(entry):
        kinds[mount.id] = mount.kind
        numbers = host.by_place.get((mount.device, proc.unescaped(mount.root)))
        if numbers is not None:
            yield numbers
    if _user_namespace(entry) == _user_namespace("self"):  # else nobody can have made nodes
        yield from host.numbers & set(_made_nodes(entry, kinds, host.folders))


def _user_namespace(entry: str) -> int:
    return os.stat(f"/proc/{entry}/ns/user").st_ino


def _made_nodes(
    entry: str, kinds: Mapping[bytes, bytes], folders: Iterable[str]
) -> Iterator[Numbers]:
    """Yield the numbers of the nodes in ``folders`` of a process' /dev.

    ``kinds`` are its mounts' filesystems.

    No link is followed and no mount entered but /dev itself, and that only where both are
    filesystems of the kernel's own: the question would wait for whoever serves another.
    """

    def is_local(fd: int) -> bool:
        return kinds.get(b"%d" % kernel.mount_id(fd)) in _LOCAL

    with _opened(f"/proc/{entry}/root") as root:
        if not is_local(root):
            return
        flags = os.O_PATH | os.O_DIRECTORY
        with _held(kernel.openat2(root, "dev", flags, kernel.RESOLVE_NO_SYMLINKS)) as dev:
            if is_local(dev):
                for folder in folders:
                    yield from _nodes_in(dev, folder)


def _nodes_in(dev: int, folder: str) -> Iterator[Numbers]:
    within = kernel.RESOLVE_NO_SYMLINKS | kernel.RESOLVE_NO_XDEV
    try:
        opened = kernel.openat2(dev, folder, os.O_RDONLY | os.O_DIRECTORY, within)
    except OSError:
        return
    with _held(opened) as fd, os.scandir(fd) as entries:
        for entry in itertools.islice(entries, _NODES_LIMIT):
            try:
                node = kernel.openat2(fd, entry.name, os.O_PATH, within)
            except OSError:
                continue  # a link, or a mount, which was told by the mount table
            with _held(node):
                status = os.fstat(node)
            if stat.S_ISCHR(status.st_mode):
                yield os.major(status.st_rdev), os.minor(status.st_rdev)


@contextlib.contextmanager
def _held(fd: int) -> Iterator[int]:
    """Close a descriptor at the end of the block."""
    try:
        yield fd
    finally:
        os.close(fd)


def _opened(path: str) -> contextlib.AbstractContextManager[int]:
    return _held(os.open(path, os.O_PATH | os.O_CLOEXEC))


def without_record(containers: Iterable[Container]) -> list[Container]:
    """Return those of the containers that were only looked at."""
    return [each for each in containers if each.record is None]


def believed(containers: Collection[Container]) -> list[Container]:
    """Return the containers but those that were only looked at and are called like a recorded one.

    Any user who may make cgroups can call one like somebody else's container.
    """
    recorded = {each.name for each in containers if each.record is not None}
    return [each for each in containers if each.record is not None or each.name not in recorded]

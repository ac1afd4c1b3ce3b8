"""Which running container has which device node, read from /proc, whatever engine started it.

A container is a set of processes with another root filesystem than ours, named by its
cgroup. Its nodes are the ones in its own /dev and the ones mounted elsewhere; they are told
apart by their device numbers, because a container may call them as it likes.

Not on the hot path: only ``gpuhook list`` and ``gpuhook repair`` come here.
"""

import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from gpuhook.rootfs import Rootfs

WITHOUT_ROOT = "Without root only your own containers are seen; run this as root for all."
_ID = re.compile(r"[0-9a-f]{64}")
_ENGINES = (
    ("libpod", "podman"),
    ("crio", "cri-o"),
    ("kubepods", "kubernetes"),
    ("cri-containerd", "kubernetes"),
    ("docker", "docker"),
)
_NODE_FOLDERS = ("/dev", "/dev/nvidia-caps")
_UNESCAPE = re.compile(r"\\([0-7]{3})")  # proc_pid_mountinfo(5) writes blanks so


@dataclass
class Container:
    """A running container: the id its cgroup says, the engine ("" unknown), its processes.

    ``pid`` is the lowest process, ``command`` that one's name, ``nodes`` the (major, minor)
    pairs of the character devices that it was given.
    """

    name: str
    engine: str
    pid: int
    command: str
    nodes: set[tuple[int, int]] = field(default_factory=set)


def running(wanted: Iterable[tuple[int, int]]) -> list[Container]:
    """Return the containers that have one of the ``wanted`` device nodes, by their ids.

    Processes that may not be looked at (those of others, without root) are left out.
    """
    numbers, seen, found = set(wanted), set[str](), dict[str, Container]()
    ours = _root_of("self")
    for entry in sorted((name for name in os.listdir("/proc") if name.isdecimal()), key=int):
        try:
            namespace = os.readlink(f"/proc/{entry}/ns/mnt")
            if namespace in seen or _root_of(entry) == ours:
                continue
            seen.add(namespace)
            _note(found, entry, numbers)
        except OSError:
            continue  # it has ended, or it isn't for us to see
    return sorted((each for each in found.values() if each.nodes), key=lambda each: each.name)


def _root_of(entry: str) -> tuple[int, int]:
    status = os.stat(f"/proc/{entry}/root")
    return status.st_dev, status.st_ino


def _note(found: dict[str, Container], entry: str, wanted: set[tuple[int, int]]) -> None:
    name, engine = identify(_text(f"/proc/{entry}/cgroup"), _text("/proc/self/cgroup"))
    container = found.get(name)
    if container is None:
        command = _text(f"/proc/{entry}/comm").strip()
        container = found[name] = Container(name, engine, int(entry), command)
    with Rootfs(f"/proc/{entry}/root") as root:
        container.nodes |= wanted & set(_nodes(root, _text(f"/proc/{entry}/mountinfo")))


def _text(path: str) -> str:
    with open(path, encoding="utf-8", errors="surrogateescape") as file:
        return file.read()


def identify(cgroups: str, ours: str = "") -> tuple[str, str]:
    """Return (container id, engine) from a process' /proc/PID/cgroup; ``ours`` is our own.

    The id is the 64 hex digits that engines use, else the last part of the path. Only a
    hierarchy in which the process has a cgroup of its own can tell: the devices', else the
    unified one, else any.
    """
    hosts = _paths(ours)
    own = {key: path for key, path in _paths(cgroups).items() if path != hosts.get(key, "/")}
    preferred = sorted(own, key=lambda key: ("devices" not in key.split(","), key != ""))
    path = own[preferred[0]] if preferred else "/"
    engine = next((name for word, name in _ENGINES if word in path), "")
    ids = _ID.findall(path)
    if ids:
        return ids[-1], engine
    return path.rpartition("/")[2].removesuffix(".scope") or "/", engine


def _paths(cgroups: str) -> dict[str, str]:
    """Return controllers -> path; the unified hierarchy has no controllers there."""
    fields = [line.split(":", 2) for line in cgroups.splitlines()]
    return {parts[1]: parts[2] for parts in fields if len(parts) > 2}


def _nodes(root: Rootfs, mountinfo: str) -> Iterator[tuple[int, int]]:
    """Yield the numbers of the character devices in /dev and of those mounted elsewhere."""
    paths = {f"{folder}/{name}" for folder in _NODE_FOLDERS for name in root.list_folder(folder)}
    for line in mountinfo.splitlines():
        point = _UNESCAPE.sub(lambda match: chr(int(match[1], 8)), line.split()[4])
        if not point.startswith(("/proc", "/sys")):
            paths.add(point)
    for path in sorted(paths):
        try:
            status = root.stat(path)
        except OSError:
            continue
        if status is not None and stat.S_ISCHR(status.st_mode):
            yield os.major(status.st_rdev), os.minor(status.st_rdev)

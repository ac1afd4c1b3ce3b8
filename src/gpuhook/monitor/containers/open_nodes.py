"""Processes that have a driver's nodes open or mapped, so that its module can't be unloaded.

A file is examined only if its filesystem can't block on another process (``nodes.is_local``):
first by the number of its mount, which asks no filesystem, then on a descriptor of its own.
"""

import contextlib
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from gpuhook.base.host import proc
from gpuhook.monitor.containers.device_users import command_of
from gpuhook.monitor.containers.nodes import Numbers, is_local
from gpuhook.monitor.host.namespaces import NamespaceScan, mounts_of

_DEV = b"/dev/"
_FIELDS = 6  # of a line in /proc/PID/maps, the last one the path


class NodeUser(NamedTuple):
    """A process, its name, and the paths of the nodes that it has open or mapped."""

    pid: int
    command: str
    nodes: tuple[str, ...]


def users(
    paths: Mapping[Numbers, str], look: NamespaceScan, pids: Iterable[str] = ()
) -> list[NodeUser]:
    """Return the processes that have nodes open, by pid; ``paths`` are the nodes' by number.

    With ``pids`` only these are examined. Processes that we may not read are left out.
    """
    tables: dict[str, proc.Mounts] = {}
    ours = proc.data_of("/proc/self/mountinfo")
    found = []
    every = [*pids] or [name for name in os.listdir("/proc") if name.isdecimal()]
    for entry in sorted(every, key=int):
        if not look.goes_on():
            break
        namespace = mounts_of(entry)
        if int(entry) == os.getpid() or not namespace:
            continue
        if namespace not in tables:  # a process may have files that its caller opened elsewhere
            tables[namespace] = proc.Mounts((look.table(entry) or b"") + ours)
        nodes: set[str] = set()
        with contextlib.suppress(OSError):  # it has exited, or isn't accessible
            numbers = {*_numbers(entry, tables[namespace])}
            nodes = {paths[each] for each in numbers if each in paths}
        if nodes:
            found.append(NodeUser(int(entry), command_of(entry), tuple(sorted(nodes))))
    return found


def _numbers(entry: str, table: proc.Mounts) -> Iterator[Numbers]:
    """Yield the numbers of the character devices that a process has open or mapped."""
    for name in os.listdir(f"/proc/{entry}/fd"):
        flags, mount = _opened_as(entry, name)
        if not flags & os.O_PATH and table.find(mount) is not None:
            yield from _device(f"/proc/{entry}/fd/{name}", table)
    for line in proc.lines(proc.data_of(f"/proc/{entry}/maps")):
        fields = line.split(b" ", _FIELDS - 1)
        if len(fields) == _FIELDS and _DEV in fields[-1]:
            yield from _device(f"/proc/{entry}/map_files/{os.fsdecode(fields[0])}", table)


def _opened_as(entry: str, name: str) -> tuple[int, bytes]:
    """Return the flags and the mount's number of a descriptor; proc_pid_fdinfo(5)."""
    lines = proc.lines(proc.data_of(f"/proc/{entry}/fdinfo/{name}"))
    fields = {key: value.strip() for key, _, value in (line.partition(b":") for line in lines)}
    return int(fields.get(b"flags", b"0"), 8), fields.get(b"mnt_id", b"-")


def _device(link: str, table: proc.Mounts) -> Iterator[Numbers]:
    try:
        fd = os.open(link, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # closed meanwhile
    try:
        status = os.fstat(fd) if is_local(fd, table) else None
    finally:
        os.close(fd)
    if status is not None and stat.S_ISCHR(status.st_mode):
        yield os.major(status.st_rdev), os.minor(status.st_rdev)

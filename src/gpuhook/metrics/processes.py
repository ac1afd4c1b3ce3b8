"""The containers of processes, read once for each process."""

import os
from collections.abc import Mapping

from gpuhook.base.host import proc
from gpuhook.metrics.containers import Owner, owner_of
from gpuhook.monitor.containers.groups import RootCgroups, groups_of, own_path

_START = 19  # field 22 of proc_pid_stat(5), counted from the one after the name


def sees_all_processes() -> bool:
    """Tell whether process ids here are the host's, as a driver reports them."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino == proc.FIRST_PIDS
    except OSError:
        return True  # there is no evidence against it


def started(pid: int) -> str:
    """Return a process's start time, in ticks since boot; "" if it is gone."""
    fields = proc.stat_fields(proc.data_of(f"/proc/{pid}/stat"))
    return fields[_START].decode() if len(fields) > _START else ""


def user_of(pid: int) -> int | None:
    """Return a process's user, None if unknown."""
    ids = proc.status(proc.data_of(f"/proc/{pid}/status")).get("Uid", ())
    return int(ids[0]) if ids else None


class Processes:
    """A cache of the owners of processes; entries that aren't requested again are dropped."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[str, str, Owner]] = {}
        self._asked: dict[int, tuple[str, str, Owner]] = {}
        self._made: RootCgroups | None = None  # root's cgroups, for this snapshot

    def place(self, pid: int) -> tuple[str, Owner]:
        """Return a process's own cgroup ("" for none) and its owner.

        For a process that has just ended, the cached value is returned, because its recent usage
        still counts.
        """
        before = self._asked.get(pid) or self._known.get(pid)
        began = started(pid)
        if before is not None and not began:
            return before[1:]  # not cached again: the next snapshot doesn't have it
        if before is None or before[0] != began:
            self._made = self._made or RootCgroups()
            groups = groups_of(pid)
            group = own_path(groups, groups_of("self"))
            before = (began, "" if group == "/" else group, owner_of(self._made.of(groups)))
        self._asked[pid] = before
        return before[1:]

    def forget(self) -> None:
        """Drop processes that weren't requested since the last call."""
        self._known, self._asked, self._made = self._asked, {}, None


def find(group: str, groups: Mapping[str, str]) -> str:
    """Return the container whose cgroup contains this one, "" if there is none."""
    while group:
        if group in groups:
            return groups[group]
        group = group.rpartition("/")[0]
    return ""


def poses(group: str, container: str, groups: Mapping[str, str]) -> bool:
    """Tell whether a cgroup has the name of a container that is known to be in another cgroup.

    A user may create cgroups of any name below a delegated one.
    """
    places = {each.partition(container)[0] for each, name in groups.items() if name == container}
    return bool(places) and (container not in group or group.partition(container)[0] not in places)

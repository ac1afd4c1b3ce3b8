"""Which container a process is in, read once for each process."""

import os
from collections.abc import Mapping

from gpuhook.ground.host import proc
from gpuhook.tools.metrics.containers import Owner, owner_of
from gpuhook.tools.running.groups import Made, groups_of, own_path

_START = 19  # field 22 of proc_pid_stat(5), counted from the one after the name


def sees_all_processes() -> bool:
    """Tell whether process ids are the machine's here, as a driver says them."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino == proc.FIRST_PIDS
    except OSError:
        return True  # nobody says that it isn't so


def started(pid: int) -> str:
    """Return when a process began, in ticks since the machine did; "" if it is gone."""
    fields = proc.stat_fields(proc.data_of(f"/proc/{pid}/stat"))
    return fields[_START].decode() if len(fields) > _START else ""


def user_of(pid: int) -> int | None:
    """Return the user whose process it is, None where that isn't known."""
    ids = proc.status(proc.data_of(f"/proc/{pid}/status")).get("Uid", ())
    return int(ids[0]) if ids else None


class Processes:
    """Whose the processes are that were asked for; what isn't asked again is forgotten."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[str, str, Owner]] = {}
        self._asked: dict[int, tuple[str, str, Owner]] = {}
        self._made: Made | None = None  # what root made of their cgroups, for this look

    def place(self, pid: int) -> tuple[str, Owner]:
        """Return a process' cgroup ("" for none of its own) and whose that is.

        Of one that has just ended it is what was known before: its use of a moment ago counts.
        """
        before = self._asked.get(pid) or self._known.get(pid)
        began = started(pid)
        if before is not None and not began:
            return before[1:]  # and not kept: the next look knows it no more
        if before is None or before[0] != began:
            self._made = self._made or Made()
            groups = groups_of(pid)
            group = own_path(groups, groups_of("self"))
            before = (began, "" if group == "/" else group, owner_of(self._made.of(groups)))
        self._asked[pid] = before
        return before[1:]

    def forget(self) -> None:
        """Forget those that weren't asked for since the last time."""
        self._known, self._asked, self._made = self._asked, {}, None


def find(group: str, groups: Mapping[str, str]) -> str:
    """Return the container whose cgroup this one is or is below, "" if none is."""
    while group:
        if group in groups:
            return groups[group]
        group = group.rpartition("/")[0]
    return ""


def poses(group: str, container: str, groups: Mapping[str, str]) -> bool:
    """Tell whether a cgroup is called like a container that is known to be in another place.

    A user may make cgroups below one of his own, and call them what he likes.
    """
    places = {each.partition(container)[0] for each, name in groups.items() if name == container}
    return bool(places) and (container not in group or group.partition(container)[0] not in places)

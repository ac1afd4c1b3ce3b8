"""Cgroups of a Slurm job on this node, and the killing of processes left in them.

Only cgroups in Slurm's own places count, in folders of root: users can create cgroups with any
name inside their own. A process is opened (pidfd) before its cgroups are read, so that no signal
reaches a later process with the same number.

Sources: Slurm's cgroup plugins; cgroups(7), the kernel's cgroup-v1/freezer-subsystem.rst and
cgroup-v2.rst.
"""

import contextlib
import os
import stat
import time
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from gpuhook.base.host import proc, signals

_FREEZING = 1.0  # seconds: a process inside a driver call may not freeze
_SECONDS = 10.0  # for all processes to exit
_PAUSE = 0.05
_KILL = 9
_ENDED = ("Z", "X")  # proc_pid_status(5), State
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class SlurmJob(NamedTuple):
    """A job, as slurmd describes it to its scripts."""

    number: int
    uid: int
    user: str


class JobGroup(NamedTuple):
    """A cgroup of a job, as in /proc/PID/cgroup, and its folder.

    For cgroup v2, the only controller is the empty string.
    """

    controllers: frozenset[bytes]
    path: str
    folder: str

    def holds(self, groups: Mapping[str, str]) -> bool:
        """Return whether a process with these cgroups is in this one, or below it."""
        return any(
            f"{path}/".startswith(f"{self.path}/")  # protects: epilog-own-group
            for key, path in groups.items()
            if frozenset(os.fsencode(key).split(b",")) <= self.controllers
        )


def find(job: SlurmJob) -> list[JobGroup]:
    """Return the job's cgroups in all mounted hierarchies."""
    found = []
    for mount in proc.Mounts(proc.data_of("/proc/self/mountinfo")):
        if mount.kind in (b"cgroup", b"cgroup2"):
            point, root = proc.unescaped(mount.point), proc.unescaped(mount.root).rstrip("/")
            is_v2 = mount.kind == b"cgroup2"
            controllers = frozenset([b""] if is_v2 else mount.options.split(b","))
            found += [
                JobGroup(controllers, f"{root}/{place}", f"{point}/{place}")
                for place in _places(point, job, is_v2=is_v2)
                if _is_roots(point, place)
            ]
    return found


def _places(point: str, job: SlurmJob, *, is_v2: bool) -> list[str]:
    """Return the paths below a mount point where Slurm may have created a job's cgroups."""
    tops = [name for name in _names(point) if name.startswith("slurm")]
    places = [f"{top}/uid_{job.uid}/job_{job.number}" for top in tops]
    if is_v2:
        scopes = [(name, name) for name in _names(point)]
        scopes += [(f"system.slice/{name}", name) for name in _names(f"{point}/system.slice")]
        places += [f"{scope}/job_{job.number}" for scope, name in scopes if _is_scope(name)]
    return places


def _is_scope(name: str) -> bool:
    return name == "slurmstepd.scope" or name.endswith("_slurmstepd.scope")


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _is_roots(point: str, place: str) -> bool:
    """Return whether a cgroup exists, and only root may create cgroups on its path."""
    try:
        fd = os.open(point, _FOLDER)
    except OSError:
        return False
    try:
        for name in place.split("/"):
            below = os.open(name, _FOLDER, dir_fd=fd)
            os.close(fd)
            fd = below
            status = os.fstat(fd)
            if status.st_uid != 0 or status.st_mode & _OTHERS:  # protects: epilog-roots-group
                return False
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def end_processes(groups: list[JobGroup], seconds: float = _SECONDS) -> list[int]:
    """Kill a job's processes except root's (Slurm's own); return those that don't exit."""
    end = time.monotonic() + seconds
    while groups:
        with _frozen(groups):
            left = [pid for pid in _pids() if _kill(pid, groups)]
        if not left or time.monotonic() >= end:
            return left
        time.sleep(_PAUSE)
    return []


def has_processes(groups: list[JobGroup]) -> bool:
    """Return whether a process of the job's user is running."""
    return bool(groups) and any(_kill(pid, groups, number=0) for pid in _pids())


def _pids() -> Iterator[int]:
    return (int(name) for name in _names("/proc") if name.isdecimal())


def _kill(pid: int, groups: list[JobGroup], number: int = _KILL) -> bool:
    """Send a signal to a process if a user runs it in these cgroups; return whether so."""
    try:
        process = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        # Checked after the open: the number may belong to another process by now.
        if not _is_jobs(pid, groups):
            return False
        signals.send(process, number)  # protects: epilog-processes
    finally:
        os.close(process)
    return True


def _is_jobs(pid: int, groups: list[JobGroup]) -> bool:
    """Return whether a user's process is in these cgroups, from data that no user controls."""
    status = proc.status(proc.data_of(f"/proc/{pid}/status"))
    if not set(status.get("Uid", ())) - {"0"}:  # protects: epilog-not-slurms
        return False
    # The first thread may have exited, or be in another cgroup (v1), while others run.
    threads = [f"/proc/{pid}"]
    if status.get("Threads") != ["1"]:  # protects: epilog-threads
        threads = [f"/proc/{pid}/task/{name}" for name in _names(f"/proc/{pid}/task")]
    elif status["State"][0] in _ENDED:
        return False
    theirs = [proc.cgroups(proc.data_of(f"{thread}/cgroup")) for thread in threads]
    return any(group.holds(each) for each in theirs for group in groups)


@contextlib.contextmanager
def _frozen(groups: list[JobGroup]) -> Iterator[None]:
    """Freeze a job for a block: processes that fork and exit would otherwise be missed.

    Only root can freeze and thaw the job's own cgroup.
    """
    try:
        _set(groups, frozen=True)  # protects: epilog-frozen
        yield
    finally:
        _set(groups, frozen=False)


def _set(groups: list[JobGroup], *, frozen: bool) -> None:
    """Freeze or thaw cgroups, and wait a limited time until that is done."""
    waits = []
    for group in groups:
        if group.controllers == {b""}:
            name, text, is_done = "cgroup.freeze", b"%d" % frozen, b"frozen %d" % frozen
            states = f"{group.folder}/cgroup.events"
        elif b"freezer" in group.controllers:
            name, text = "freezer.state", b"FROZEN" if frozen else b"THAWED"
            states, is_done = f"{group.folder}/{name}", text
        else:
            continue
        with contextlib.suppress(OSError):
            _write(f"{group.folder}/{name}", text)
            waits.append((states, is_done))
    end = time.monotonic() + _FREEZING
    while time.monotonic() < end and not all(_says(path, line) for path, line in waits):
        time.sleep(_PAUSE)


def _says(path: str, line: bytes) -> bool:
    """Return whether a cgroup's file has a line, or is gone."""
    data = proc.data_of(path)
    return not data or line in proc.lines(data)


def _write(path: str, text: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text)
    finally:
        os.close(fd)

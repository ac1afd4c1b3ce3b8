"""Trusted processes of this host: root's own daemons, or the user's own.

Any user, and any container, may name a process dockerd and give it any arguments. A
process's data is trusted only if it has the right user, is in our own
user and PID namespaces, and isn't a set-user-ID program that another user started.

Of another user's process only the status is read: its arguments are in its own memory, and it
decides how long reading them takes.
"""

import contextlib
import os
import signal
import stat
from collections.abc import Container, Iterator
from dataclasses import dataclass

from gpuhook.base.host import files as host_files
from gpuhook.base.host import proc, signals

_TICKS = os.sysconf("SC_CLK_TCK")
# Seconds by which ``Process.started`` may be wrong: /proc/stat has the boot in whole seconds, and
# clocks are corrected.
START_PRECISION = 2.0
_NAME = 15  # characters of a process' name that the kernel keeps, TASK_COMM_LEN without its NUL
_CAP_SYS_ADMIN = 1 << 21  # linux/capability.h; without it no engine can make a container
_ENDED = ("Z", "X")  # proc_pid_status(5), State
_ROOT = 0


@dataclass(frozen=True)
class Process:
    """A running program.

    ``ticks`` are the clock ticks from the boot to its start, ``started`` are seconds since
    1970, 0 where that isn't known. ``environment`` is None where it may not be read. ``root``
    is where the files that it sees are for us: "" where it sees what we do.
    """

    pid: int
    uid: int
    argv: tuple[str, ...]
    ticks: int
    started: float
    environment: dict[str, str] | None
    root: str

    def option(self, *names: str) -> list[str]:
        """Return the values given to an option, written --name=VALUE or --name VALUE."""
        values = []
        for at, word in enumerate(self.argv):
            name, equals, value = word.partition("=")
            if name in names and equals:
                values.append(value)
            elif word in names and at + 1 < len(self.argv):
                values.append(self.argv[at + 1])
        return values

    def reads(self, own: str, ours: str) -> bool:
        """Tell whether the file that the process knows as ``own`` is the one we know as ``ours``.

        It may run in another mount namespace, so the two are compared as files. A file
        that doesn't exist is compared by name.
        """
        try:
            theirs = os.stat(f"/proc/{self.pid}/root{own}")
            return os.path.samestat(theirs, os.stat(ours))
        except OSError:
            return os.path.abspath(own) == os.path.abspath(ours)


def running(
    name: str, root: str = "", users: Container[int] | None = None, *, unseen: bool = False
) -> list[Process]:
    """Return the processes of that name (15 characters count) that may be believed, by their ids.

    ``root`` is the machine's / for us. ``users`` are the users whose processes count; None
    means only ourselves, so that for root only root's do. ``unseen`` has root's processes
    count whose program a root without capabilities may not see.
    """
    found = []
    users = (os.geteuid(),) if users is None else users
    for entry in sorted(_entries(root), key=int):
        process = _Entry(root, entry, unseen=unseen).process(name, users)
        if process is not None:
            found.append(process)
    return found


def send(process: Process, number: signal.Signals) -> bool:
    """Send a signal to a process that ``running`` returned; tell whether it still existed.

    Never to a later process with the same id.
    """
    try:
        fd = os.pidfd_open(process.pid)
    except OSError:
        return False
    try:
        if _Entry("", str(process.pid)).ticks() != process.ticks:  # protects: same-process
            return False
        return signals.send(fd, number)
    finally:
        os.close(fd)


def _entries(root: str) -> Iterator[str]:
    with contextlib.suppress(OSError):
        yield from (name for name in os.listdir(f"{root}/proc") if name.isdecimal())


class _Entry:
    """A process' folder in /proc."""

    def __init__(self, root: str, entry: str, *, unseen: bool = False) -> None:
        self._root = root
        self._id = entry
        self._unseen = unseen

    def process(self, name: str, users: Container[int]) -> Process | None:
        """Return the process, None unless it has that name and is trusted."""
        status = proc.status(self._data("status"))
        # protects: status-alone
        if status.get("Name") != [name[:_NAME]] or not self._is_believed(status, users):
            return None
        command = os.fsdecode(self._data("cmdline"))
        if not command:
            return None
        return Process(
            int(self._id),
            int(status["Uid"][0]),
            tuple(command.rstrip("\0").split("\0")),
            self.ticks(),
            self._started(),
            self._environment(),
            self._seen_root(),
        )

    def ticks(self) -> int:
        """Return its start time: field 22 of proc_pid_stat(5), in ticks since boot; else 0."""
        fields = proc.stat_fields(self._data("stat"))
        return int(fields[19]) if len(fields) > 19 else 0

    def _path(self, name: str) -> str:
        return f"{self._root}/proc/{self._id}/{name}"

    def _data(self, name: str) -> bytes:
        """Return the contents of a file of it, b"" if there is nothing to read."""
        try:
            return host_files.read_start(self._path(name))
        except OSError:
            return b""

    def _is_believed(self, status: dict[str, list[str]], users: Container[int]) -> bool:
        # protects: ended-process
        if status.get("State", [""])[0] in _ENDED or len(status.get("NSpid", ())) > 1:
            return False
        ids = set(status.get("Uid", ()))  # real, effective, saved and filesystem's
        if len(ids) != 1 or int(uid := ids.pop()) not in users:  # protects: roots-process
            return False
        return int(uid) != _ROOT or self._is_roots(int(status.get("CapEff", ["0"])[0], 16))

    def _is_roots(self, capabilities: int) -> bool:
        """Tell whether a process of user 0 is the host's root, started by root.

        A set-user-ID program (sudo) is root's too, and its caller chooses its arguments.
        """
        if not capabilities & _CAP_SYS_ADMIN:  # protects: no-rights
            return False
        try:
            namespace = os.readlink(self._path("ns/user"))
            program = os.stat(self._path("exe"))
            ours = os.readlink(f"{self._root}/proc/self/ns/user")
        except PermissionError:
            # Root's processes can do an ordinary user no harm.
            return self._unseen or os.geteuid() != _ROOT
        except OSError:
            return False
        return namespace == ours and not program.st_mode & stat.S_ISUID  # protects: set-user-id

    def _environment(self) -> dict[str, str] | None:
        try:
            text = os.fsdecode(host_files.read_start(self._path("environ")))
        except OSError:
            return None
        pairs = (word.partition("=") for word in text.split("\0") if word)
        return {key: value for key, _, value in pairs}

    def _seen_root(self) -> str:
        """Return the path of its / for us: in our mount namespace it may be in a chroot."""
        own = f"{self._root}/proc/self"
        try:
            is_same = os.readlink(self._path("ns/mnt")) == os.readlink(f"{own}/ns/mnt")
            is_same = is_same and os.path.samefile(self._path("root"), f"{own}/root")
        except OSError:
            return self._root
        return self._root if is_same else self._path("root")

    def _started(self) -> float:
        try:
            data = host_files.read_start(f"{self._root}/proc/stat")
        except OSError:
            return 0.0
        boots = [line[6:] for line in proc.lines(data) if line.startswith(b"btime ")]
        return int(boots[0]) + self.ticks() / _TICKS if boots else 0.0

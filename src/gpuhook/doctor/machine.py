"""The machine that the doctor looks at, below a prefix that is / except in tests."""

import glob
import os
from collections.abc import Iterator
from dataclasses import dataclass

_PIECE, _PIECES = 1 << 16, 256  # 16 MiB; no file that is read here comes near
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Process:
    """A running program.

    ``started`` is in seconds since 1970; ``environment`` is None where it may not be read;
    ``machine`` is the machine as the process sees it, in its mount namespace.
    """

    pid: int
    uid: int
    argv: tuple[str, ...]
    started: float
    environment: dict[str, str] | None
    machine: "Machine"

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


class Machine:
    """Files and processes below ``root``; every path given to it is one on that machine."""

    def __init__(self, root: str = "/") -> None:
        self.root = root.rstrip("/")

    def path(self, path: str) -> str:
        """Return where a path of the machine is for us."""
        return self.root + path

    def text(self, path: str) -> str | None:
        """Return a file's text, None where it isn't there or may not be read."""
        chunks: list[bytes] = []
        try:
            with open(self.path(path), "rb", buffering=0) as file:
                # In pieces, because files in /proc/sys refuse to be read by the megabyte.
                while (chunk := file.read(_PIECE)) and len(chunks) < _PIECES:
                    chunks.append(chunk)
        except OSError:
            return None
        return b"".join(chunks).decode("utf-8", "replace")

    def stat(self, path: str) -> os.stat_result | None:
        """Return a path's status, links followed, or None."""
        try:
            return os.stat(self.path(path))
        except OSError:
            return None

    def exists(self, path: str) -> bool:
        """Tell whether a path exists."""
        return self.stat(path) is not None

    def is_program(self, path: str) -> bool:
        """Tell whether a path is a file that may be executed."""
        found = self.path(path)
        return os.path.isfile(found) and os.access(found, os.X_OK)

    def target(self, path: str) -> str:
        """Return what a link says, the path itself where it is none."""
        try:
            return os.readlink(self.path(path))
        except OSError:
            return path

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder, sorted; empty where there is none."""
        try:
            return sorted(os.listdir(self.path(folder)))
        except OSError:
            return []

    def glob(self, pattern: str) -> list[str]:
        """Return the machine's paths that fit a shell pattern, sorted."""
        found = glob.glob(glob.escape(self.root) + pattern)
        return sorted(path[len(self.root) :] for path in found)

    def which(self, name: str, folders: str) -> str | None:
        """Return the program's path in the first of the folders (``a:b``) that has it."""
        for folder in folders.split(":"):
            if folder.startswith("/") and self.is_program(f"{folder}/{name}"):
                return f"{folder.rstrip('/')}/{name}"
        return None

    def processes(self, name: str) -> Iterator[Process]:
        """Yield the processes of that name (15 characters count) that aren't in containers."""
        ours = self._namespace("self", "pid")
        for entry in self.names("/proc"):
            comm = self.text(f"/proc/{entry}/comm") if entry.isdecimal() else None
            if comm is None or comm.rstrip("\n") != name[:15]:
                continue
            if self._namespace(entry, "pid") not in (ours, ""):
                continue
            process = self._process(entry)
            if process is not None:
                yield process

    def _namespace(self, entry: str, kind: str) -> str:
        try:
            return os.readlink(self.path(f"/proc/{entry}/ns/{kind}"))
        except OSError:
            return ""

    def _process(self, entry: str) -> Process | None:
        status, command = self.stat(f"/proc/{entry}"), self.text(f"/proc/{entry}/cmdline")
        if status is None or not command:
            return None
        environ = self.text(f"/proc/{entry}/environ")
        environment = None
        if environ is not None:
            pairs = (word.partition("=") for word in environ.split("\0") if word)
            environment = {key: value for key, _, value in pairs}
        argv = tuple(command.rstrip("\0").split("\0"))
        started = self._started(entry)
        uid = self._uid(entry, status.st_uid)
        return Process(int(entry), uid, argv, started, environment, self._seen_by(entry))

    def _uid(self, entry: str, owner: int) -> int:
        """Return a process' real user; its folder belongs to root where it dumps no core."""
        for line in (self.text(f"/proc/{entry}/status") or "").splitlines():
            if line.startswith("Uid:"):
                return int(line.split()[1])
        return owner

    def _seen_by(self, entry: str) -> "Machine":
        if self._namespace(entry, "mnt") in (self._namespace("self", "mnt"), ""):
            return self
        return Machine(self.path(f"/proc/{entry}/root"))

    def _started(self, entry: str) -> float:
        """Return when a process began: field 22 of proc(5)'s stat, in ticks since boot."""
        fields = (self.text(f"/proc/{entry}/stat") or "").rpartition(")")[2].split()
        ticks = int(fields[19]) if len(fields) > 19 else 0
        for line in (self.text("/proc/stat") or "").splitlines():
            if line.startswith("btime "):
                return int(line.split()[1]) + ticks / _TICKS
        return 0.0

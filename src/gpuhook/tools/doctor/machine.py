"""The examined host, below a prefix that is / except in tests."""

import glob
import os
from collections.abc import Container

from gpuhook.base.container import kernel
from gpuhook.base.host import files as host_files
from gpuhook.monitor.host import processes as host_processes
from gpuhook.monitor.host.processes import Process
from gpuhook.tools.engines import marks

_ROOT = 0


class Machine:
    """Files and processes below ``root``; all paths are relative to that machine.

    ``users`` are the trusted owners of processes: root and the current user by default.
    """

    def __init__(self, root: str = "/", users: Container[int] | None = None) -> None:
        self.root = root.rstrip("/")
        self._users = (_ROOT, os.geteuid()) if users is None else users

    def path(self, path: str) -> str:
        """Return the path on this host for a path of the machine."""
        return self.root + path

    def text(self, path: str) -> str | None:
        """Return a file's text without a byte order mark, None if it can't be read."""
        try:
            data = host_files.read_start(self.path(path))
        except OSError:
            return None
        try:
            return marks.decoded(data)
        except UnicodeDecodeError:
            return data.decode("utf-8", "replace")

    def data(self, path: str) -> bytes:
        """Return a file's content, b"" if it is missing or unreadable."""
        try:
            return host_files.read_start(self.path(path))
        except OSError:
            return b""

    def is_closed(self, path: str) -> bool:
        """Tell whether a file is inaccessible, so its content is unknown."""
        try:
            host_files.read_start(self.path(path), 1)
        except PermissionError:
            return True
        except OSError:
            return False
        return False

    def stat(self, path: str) -> os.stat_result | None:
        """Return a path's status, links followed, or None."""
        try:
            return os.stat(self.path(path))
        except (OSError, ValueError):
            return None

    def label(self, path: str) -> bytes:
        """Return a file's SELinux label, empty if it has none."""
        try:
            return os.getxattr(self.path(path), kernel.LABEL).rstrip(b"\0")
        except OSError:
            return b""

    def exists(self, path: str) -> bool:
        """Tell whether a path exists."""
        return self.stat(path) is not None

    def is_program(self, path: str) -> bool:
        """Tell whether a path is an executable file."""
        found = self.path(path)
        return os.path.isfile(found) and os.access(found, os.X_OK)

    def target(self, path: str) -> str:
        """Return a link's target, or the path itself if it isn't a link."""
        try:
            return os.readlink(self.path(path))
        except (OSError, ValueError):
            return path

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder, sorted; empty if there is no folder."""
        try:
            return sorted(os.listdir(self.path(folder)))
        except (OSError, ValueError):
            return []

    def glob(self, pattern: str) -> list[str]:
        """Return the machine's paths that match a shell pattern, sorted."""
        found = glob.glob(glob.escape(self.root) + pattern)
        return sorted(path[len(self.root) :] for path in found)

    def which(self, name: str, folders: str) -> str | None:
        """Return a program's path in the first of the folders (``a:b``) that has it."""
        for folder in folders.split(":"):
            if folder.startswith("/") and self.is_program(f"{folder}/{name}"):
                return f"{folder.rstrip('/')}/{name}"
        return None

    def processes(self, name: str) -> list[Process]:
        """Return the trusted processes with a name, of which 15 characters are compared."""
        return host_processes.running(name, self.root, self._users)


def seen_by(process: Process) -> Machine:
    """Return the machine in the mount namespace of a process."""
    return Machine(process.root)

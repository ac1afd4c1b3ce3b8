"""The device plugin's status file: which resources are registered, and the last problem.

The server process holds a lock on it (flock(2)) for as long as it serves, so that a reader sees
whether one does. The installer of the container image reads it (packaging/kubernetes/image).
"""

import fcntl
import json
import os
from contextlib import suppress

from gpuhook.base.errors import GpuhookError
from gpuhook.base.host import files as host_files

# Not in state-dir: the installer's pod, which reads it, doesn't know the node's settings.
FOLDER = "/run/gpuhook"
NAME = "device-plugin.status"
_LONGEST_PROBLEM = 500  # characters


class StatusFile:
    """The file in ``folder``, "" for none.

    A file can't be replaced while it is locked, so it is written in place, in one call.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._fd = -1
        self._resources: dict[str, str] = {}
        self.keep()

    def keep(self) -> None:
        """Lock and write the file, if another process had it until now, or it couldn't be made."""
        if self._folder and self._fd < 0:
            with suppress(OSError, GpuhookError):
                self._fd = _locked(self._folder)
                self._write()

    def set(self, resource: str, problem: str) -> None:
        """Set a resource's problem, "" for a registered one."""
        if self._resources.get(resource) != problem:
            self._resources[resource] = problem
            self._write()

    def drop(self, resource: str) -> None:
        """Remove a resource that is no longer offered."""
        if self._resources.pop(resource, None) is not None:
            self._write()

    def _write(self) -> None:
        if self._fd < 0:
            return
        said = {name: text[:_LONGEST_PROBLEM] for name, text in sorted(self._resources.items())}
        data = json.dumps({"resources": said}).encode() + b"\n"
        with suppress(OSError):  # a full disk is no reason to stop serving
            os.pwrite(self._fd, data, 0)
            os.ftruncate(self._fd, len(data))


def _locked(folder: str) -> int:
    """Return the descriptor of the locked file; OSError if another process holds the lock."""
    host_files.check_way(folder)
    os.makedirs(folder, 0o755, exist_ok=True)
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(f"{folder}/{NAME}", flags, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise
    return fd

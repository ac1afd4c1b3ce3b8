"""The device plugin's status file: which resources are registered, and the last problem.

The server process holds a lock on it (flock(2)) for as long as it serves, so that a reader sees
whether one does. The installer of the container image reads it (packaging/kubernetes/image).
"""

import os
from contextlib import suppress

from gpuhook.base.oci import jsontext
from gpuhook.base.state_directory import StateDirectory, StateLock

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
        self._lock: StateLock | None = None
        self._resources: dict[str, str] = {}
        self.keep()

    def keep(self) -> None:
        """Lock and write the file, if another process had it until now, or it couldn't be made."""
        folder = StateDirectory.make(self._folder) if self._folder and not self._lock else None
        if folder is not None:
            with folder, suppress(OSError):
                self._lock = folder.lock(NAME)
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
        if self._lock is None:
            return
        said = {name: text[:_LONGEST_PROBLEM] for name, text in sorted(self._resources.items())}
        data = jsontext.dumps({"resources": said}).encode() + b"\n"
        with suppress(OSError):  # a full disk is no reason to stop serving
            os.pwrite(self._lock.fd, data, 0)
            os.ftruncate(self._lock.fd, len(data))

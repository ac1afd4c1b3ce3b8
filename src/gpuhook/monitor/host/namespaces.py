"""A scan of the mount namespaces of the host's processes, with a time limit.

Any user may create thousands of namespaces, processes and mounts. So each namespace is scanned only
once, whatever processes are in it, and an incomplete scan is reported as such.
"""

import errno
import os
import time
from collections.abc import Callable

from gpuhook.base.host import proc

PATIENCE = 2.0  # seconds for a scan
_INIT = "1"
_ENDED = (errno.ENOENT, errno.ESRCH, errno.EINVAL)  # /proc's errors for a process that has ended
_MAX_TABLE = 1 << 24  # bytes of a mount table; with thousands of mounts it has one MiB


class NamespaceScan:
    """A scan with a limit of ``seconds``.

    ``is_whole`` is true if the time was sufficient, ``is_hidden`` if there are processes that we
    may not read (except the first one, which is in no container).
    """

    def __init__(
        self, seconds: float = PATIENCE, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.is_whole, self.is_hidden = True, False
        self._clock = clock
        self._end = clock() + seconds

    def goes_on(self) -> bool:
        """Tell whether there is time left; if not, the scan is incomplete."""
        if self._clock() >= self._end:
            self.is_whole = False
        return self._clock() < self._end

    def namespaces(self) -> dict[str, list[str]]:
        """Return each mount namespace with its processes' ids, in ascending order.

        Processes that we may not read are left out, and so are those beyond the time limit.
        """
        found: dict[str, list[str]] = {}
        for entry in sorted((name for name in os.listdir("/proc") if name.isdecimal()), key=int):
            if not self.goes_on():
                break
            try:
                found.setdefault(os.readlink(f"/proc/{entry}/ns/mnt"), []).append(entry)
            except OSError as error:
                self.is_hidden |= entry != _INIT and error.errno not in _ENDED
        return found

    def table(self, entry: str) -> bytes | None:
        """Return the mount table of a process: b"" if it is too long, None if the process ended."""
        try:
            return proc.read(f"/proc/{entry}/mountinfo", most=_MAX_TABLE)
        except OSError as error:
            if error.errno in _ENDED:
                return None
            self.is_whole = False
            return b""


def mounts_of(entry: str | int) -> str:
    """Return the name of a process's mount namespace, "" if we may not read it."""
    try:
        return os.readlink(f"/proc/{entry}/ns/mnt")
    except OSError:
        return ""

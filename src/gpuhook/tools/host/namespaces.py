"""One look at the mount namespaces of the machine's processes, which ends after a while.

Any user may have namespaces, processes in them and mounts by the thousand. So a namespace is
looked at once, whoever is in it, and what isn't looked at in time is said to be missing.
"""

import errno
import os
import time
from collections.abc import Callable

from gpuhook.ground.host import proc

PATIENCE = 2.0  # seconds for a look
_INIT = "1"
_ENDED = (errno.ENOENT, errno.ESRCH, errno.EINVAL)  # what /proc says of a process that has
_TABLE_LIMIT = 1 << 24  # bytes of a mount table; with thousands of mounts it has one MiB


class Look:
    """A look that is over after so many ``seconds``.

    ``is_whole`` tells whether the time was enough for all, ``is_hidden`` whether there are
    processes that aren't for us to look at (but the first one, which is in no container).
    """

    def __init__(
        self, seconds: float = PATIENCE, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.is_whole, self.is_hidden = True, False
        self._clock = clock
        self._end = clock() + seconds

    def goes_on(self) -> bool:
        """Tell whether there is time left; if not, the look isn't whole."""
        if self._clock() >= self._end:
            self.is_whole = False
        return self._clock() < self._end

    def namespaces(self) -> dict[str, list[str]]:
        """Return each mount namespace with its processes' ids, in their order.

        Those that aren't for us to know are left out, and so is what there is no time for.
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
        """Return the mount table of a process: b"" for one that is too long, None if it ended."""
        try:
            return proc.read(f"/proc/{entry}/mountinfo", most=_TABLE_LIMIT)
        except OSError as error:
            if error.errno in _ENDED:
                return None
            self.is_whole = False
            return b""


def mounts_of(entry: str | int) -> str:
    """Return the name of a process' mount namespace, "" where it isn't for us to know."""
    try:
        return os.readlink(f"/proc/{entry}/ns/mnt")
    except OSError:
        return ""

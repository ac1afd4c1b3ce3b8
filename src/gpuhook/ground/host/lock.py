"""A lock on an open file: one process at a time, and nobody waits for ever."""

import errno
import fcntl
import time

_POLL = 0.01  # seconds between two looks: flock(2) itself knows no limit


def take(fd: int, seconds: float = 0.0) -> bool:
    """Lock a file for as long as it is open; False where somebody else does so all that time.

    OSError where the file's system has no locks. Source: flock(2).
    """
    end = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EINTR):
                raise
        else:
            return True
        if time.monotonic() >= end:  # protects: lock-patience
            return False
        time.sleep(_POLL)


def hold(fd: int) -> bool:
    """Lock a file until this process ends, and no child has the lock; False where another does so.

    Such locks count in all pid namespaces, where numbers of processes don't. Closing any descriptor
    of that file lets go of it. OSError where the file's system has no locks. Source: fcntl(2).
    """
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True

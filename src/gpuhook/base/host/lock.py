"""File locks: one process at a time, with a limited wait."""

import errno
import fcntl
import time

_POLL = 0.01  # seconds between attempts: flock(2) itself has no timeout


def take(fd: int, seconds: float = 0.0) -> bool:
    """Lock a file while it is open; False if another process holds the lock all that time.

    OSError if the filesystem has no locks. Source: flock(2).
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
    """Lock a file until this process ends; False if another process holds the lock.

    Children don't inherit the lock. Such locks work across pid namespaces, where process ids
    don't. Closing any descriptor of that file releases it. OSError if the filesystem has no
    locks. Source: fcntl(2).
    """
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True

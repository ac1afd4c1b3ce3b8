"""The prefork server's descriptors, and the slots for its responses.

A launcher claims a slot by creating a file in the server's folder (``FOLDER_FD``) with O_EXCL, and
reads from the slot's pipe. The server and the spare worker hold the writing end; once the server
has passed the request on, only that worker does. So a launcher whose worker dies reads an end of
file.
"""

import fcntl
import os
import time

from gpuhook.base.state_directory import StateDirectory
from gpuhook.prefork import instance

# Descriptors of the prefork server, as the launcher knows them: requests come through a pipe, and
# folder and launcher prove the server's identity. Slot N is SLOTS + N.
REQUEST_PIPE, FOLDER_FD, LAUNCHER = 3, 5, 6
FOLDER = StateDirectory(FOLDER_FD, "")
SLOTS, SLOT_COUNT = 64, 192
# A worker's, in addition to FOLDER_FD: the hook's pipes, and the one for reports to its parent.
# Before its request, a worker has the pipe that brings it in place of the one for the response.
ASKED, ANSWER, REPORT = 3, 4, 7
REQUEST = ANSWER
REQUESTS_MOST = 1 << 16  # bytes, the capacity of a pipe
_FREE = 16  # from here to the slots, descriptors have no fixed meaning


def moved(fd: int) -> int:
    """Move a descriptor out of the fixed numbers; return its new number."""
    copy: int = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FREE)
    os.close(fd)
    return copy


def renew(slot: int) -> None:
    """Give a slot a new pipe, of which only we have the writing end."""
    reader, writer = os.pipe()
    os.dup2(writer, SLOTS + slot, inheritable=False)
    os.close(writer)
    os.close(reader)


def free(slot: int) -> None:
    """Free a slot for another launcher; it gets a new pipe."""
    renew(slot)
    FOLDER.remove(_claim_name(slot))


def free_late(seconds: float) -> bool:
    """Free the slots claimed more than ``seconds`` ago; return whether there were any.

    Their launchers have ended, or are so late that they read an end of file.
    """
    claimed = set(FOLDER.names())
    names = {slot: _claim_name(slot) for slot in range(SLOT_COUNT)}
    late = [slot for slot, name in names.items() if name in claimed and _is_older(name, seconds)]
    for slot in late:
        free(slot)
    return bool(late)


def _claim_name(slot: int) -> str:
    return f".{os.getpid()}.{slot}"


def _is_older(name: str, seconds: float) -> bool:
    """Return whether a file is older; one with a future time is, as the clock was set back."""
    try:
        return abs(time.time() - os.stat(name, dir_fd=FOLDER.fd).st_mtime) > seconds
    except FileNotFoundError:
        return False


def _remove_names(pid: int) -> None:
    for name in FOLDER.names():
        if name == str(pid) or name.startswith(f".{pid}."):
            FOLDER.remove(name)


def remove_forgotten() -> None:
    """Remove the files of servers that have ended, in any pid namespace."""
    for name in FOLDER.names():
        # protects: others-names
        file = instance.take_name(FOLDER, name, for_life=True) if name.isdecimal() else None
        if file is not None:
            _remove_names(int(name))
            os.close(file)

"""The descriptors of the process that stands ready, and the seats for its answers.

A launcher claims a seat by making a file in the process' folder, ``MARK``, which can be made once,
and reads from that seat's pipe. The seat's writing end is in the process and the child that is
ahead, and from its question on in that child alone: the death of both, or then of either, is an end
of file for the launcher.
"""

import fcntl
import os
import time

from gpuhook.ground.host import lock as locking
from gpuhook.standby import place

# Descriptors of the process that stands ready, as the launcher knows them: questions come in
# at the door, and folder and launcher prove that it is what it is said to be. Seat N is SEATS + N.
DOOR, MARK, LAUNCHER = 3, 5, 6
SEATS, SEAT_COUNT = 64, 192
# Those of a child, beside MARK: the hook's pipes, and what its parent hears of it. Until it has a
# question it has the pipe that this comes through in the place of the one for the answer.
ASKED, ANSWER, REPORT = 3, 4, 7
QUESTION = ANSWER
QUESTIONS = 1 << 16  # bytes: as many as a pipe holds
_FREE = 16  # from here to the seats a descriptor is in nobody's way


def moved(fd: int) -> int:
    """Return a copy of a descriptor that is in nobody's way."""
    copy: int = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FREE)
    os.close(fd)
    return copy


def renew(seat: int) -> None:
    """Give a seat a new pipe, of which we have the writing end alone."""
    reader, writer = os.pipe()
    os.dup2(writer, SEATS + seat, inheritable=False)
    os.close(writer)
    os.close(reader)


def free(seat: int) -> None:
    """Let another launcher claim a seat, which gets a new pipe."""
    renew(seat)
    _remove(_claim_name(seat))


def free_late(seconds: float) -> bool:
    """Free the seats that were claimed longer ago; tell whether there were any.

    Their launchers have ended, or are so late that they find the end of a file.
    """
    claimed = set(os.listdir(MARK))
    names = {seat: _claim_name(seat) for seat in range(SEAT_COUNT)}
    late = [seat for seat, name in names.items() if name in claimed and _is_older(name, seconds)]
    for seat in late:
        free(seat)
    return bool(late)


def _claim_name(seat: int) -> str:
    return f".{os.getpid()}.{seat}"


def _is_older(name: str, seconds: float) -> bool:
    """Tell whether a file was made longer ago; one of times to come was, before a clock's jump."""
    try:
        return abs(time.time() - os.stat(name, dir_fd=MARK).st_mtime) > seconds
    except FileNotFoundError:
        return False


def _remove(name: str) -> None:
    try:
        os.unlink(name, dir_fd=MARK)
    except FileNotFoundError:
        pass


def _remove_names(pid: int) -> None:
    for name in os.listdir(MARK):
        if name == str(pid) or name.startswith(f".{pid}."):
            _remove(name)


def remove_forgotten() -> None:
    """Remove the names of processes that have ended, of whatever pid namespace they were."""
    for name in os.listdir(MARK):
        # protects: others-names
        file = place.take_name(MARK, name, locking.hold) if name.isdecimal() else None
        if file is not None:
            _remove_names(int(name))
            os.close(file)

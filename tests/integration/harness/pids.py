"""Processes that get the number of one that has ended, as happens by chance on a busy machine."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# The number that was given last in this pid namespace: the next process gets the one after it,
# if that is free. Source: proc_sys_kernel(5).
_LAST = Path("/proc/sys/kernel/ns_last_pid")
_ATTEMPTS = 10_000  # other processes start meanwhile, and may be given the number for a while


@contextmanager
def process() -> Iterator[int]:
    """Give the number of a process that sleeps until the end of the block."""
    sleeper = _start()
    try:
        yield sleeper.pid
    finally:
        _end(sleeper)


@contextmanager
def process_numbered(pid: int) -> Iterator[None]:
    """Have a process sleep, until the end of the block, whose number is one that was free."""
    for _ in range(_ATTEMPTS):
        _LAST.write_text(str(pid - 1))
        sleeper = _start()
        if sleeper.pid == pid:
            break
        _end(sleeper)
    else:
        raise AssertionError(f"no process could be given the number {pid}")
    try:
        yield
    finally:
        _end(sleeper)


def _start() -> "subprocess.Popen[bytes]":
    return subprocess.Popen(["sleep", "1000"])


def _end(sleeper: "subprocess.Popen[bytes]") -> None:
    os.kill(sleeper.pid, signal.SIGKILL)
    sleeper.wait()

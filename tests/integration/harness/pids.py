"""Processes that get the number of one that has ended, as happens by chance on a busy machine.

They live in a pid namespace of their own: on the machine's, numbers are left alone.
"""

import ctypes
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from harness.sandbox import MS_PRIVATE, MS_REC, in_child, mount, unshare_mounts

CLONE_NEWPID = 0x20000000  # linux/sched.h
# The number that was given last in this pid namespace: the next process gets the one after it,
# if that is free. Source: proc_sys_kernel(5).
_LAST = Path("/proc/sys/kernel/ns_last_pid")

T = TypeVar("T")


def in_own_pid_namespace(work: Callable[[], T]) -> T:
    """Run a function where no other process is started; return its result."""

    def as_init() -> T:
        unshare_mounts()
        mount("", "/", "", MS_PRIVATE | MS_REC)
        mount("proc", "/proc", "proc", 0)
        return work()

    def parent() -> T:
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.unshare(CLONE_NEWPID) == 0, os.strerror(ctypes.get_errno())
        return in_child(as_init)

    return in_child(parent)


def let_next_be(pid: int) -> None:
    """Have the next process that starts get a number, which must be free."""
    assert os.getpid() == 1, "only in a pid namespace of its own"
    _LAST.write_text(str(pid - 1))


@contextmanager
def process() -> Iterator[int]:
    """Give the number of a process that sleeps until the end of the block."""
    sleeper = subprocess.Popen(["sleep", "1000"])
    try:
        yield sleeper.pid
    finally:
        sleeper.send_signal(signal.SIGKILL)
        sleeper.wait()


@contextmanager
def process_numbered(pid: int) -> Iterator[None]:
    """Have a process sleep, until the end of the block, whose number is one that was free."""
    let_next_be(pid)
    with process() as number:
        assert number == pid
        yield

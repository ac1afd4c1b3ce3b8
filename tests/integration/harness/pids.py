"""Processes that get the id of an exited process, as happens by chance on a busy host.

They are in their own PID namespace, so the process ids of the host are left alone.
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
# The last process ID allocated in this PID namespace. The next process gets the ID after it, if
# that is free. Source: proc_sys_kernel(5).
_LAST = Path("/proc/sys/kernel/ns_last_pid")

T = TypeVar("T")


def in_own_pid_namespace(work: Callable[[], T]) -> T:
    """Run a function in its own PID namespace; return its result.

    No other process is started there.
    """

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
    """Make the next process that starts get this process id, which must be free."""
    assert os.getpid() == 1, "only in a pid namespace of its own"
    _LAST.write_text(str(pid - 1))


@contextmanager
def process() -> Iterator[int]:
    """Yield the id of a process that sleeps until the end of the block."""
    sleeper = subprocess.Popen(["sleep", "1000"])
    try:
        yield sleeper.pid
    finally:
        sleeper.send_signal(signal.SIGKILL)
        sleeper.wait()


@contextmanager
def process_numbered(pid: int) -> Iterator[None]:
    """Run a sleeping process with this id, which must be free, until the end of the block."""
    let_next_be(pid)
    with process() as number:
        assert number == pid
        yield

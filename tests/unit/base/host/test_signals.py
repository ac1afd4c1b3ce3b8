"""Signals, sent through open descriptors, and by pid only to gpuhook's own children."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from gpuhook.base.host import signals

MANY = 1 << 30  # more than any process' number (PID_MAX_LIMIT is 1 << 22)


@pytest.fixture
def child() -> Iterator[int]:
    """A child process that waits for a signal."""
    pid = os.fork()
    if pid == 0:
        signal.pause()
        os._exit(0)
    yield pid
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return
    signals.send_to_child(pid, signal.SIGKILL)
    try:
        os.waitpid(pid, 0)
    except ChildProcessError:
        pass


def test_a_signal_reaches_a_running_child_only(child: int) -> None:
    assert signals.send_to_child(child, signal.SIGTERM)
    assert os.waitpid(child, 0)[1] == signal.SIGTERM
    assert not signals.send_to_child(child, signal.SIGTERM)


def test_an_unreaped_child_still_exists_and_accepts_signals(child: int) -> None:
    signals.send_to_child(child, signal.SIGKILL)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert signals.exists(child)
    assert signals.send_to_child(child, signal.SIGKILL)  # a zombie, which nothing has waited for


@pytest.mark.protects(
    "own-child",
    "a signal to a child process doesn't reach another process that reused its id",
    instead="pass",
)
def test_a_process_that_is_no_child_gets_no_signal() -> None:
    """The pid of an exited child may have been given to an unrelated process."""
    script = (
        "import os, time; pid = os.fork(); print(pid or '', end='', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        found = os.open(f"/proc/{parent.pid}/task/{parent.pid}/children", os.O_RDONLY)
        while not (text := os.pread(found, 64, 0)):
            pass
        os.close(found)
        grandchild = int(text)
        held = os.pidfd_open(grandchild)
        assert not signals.send_to_child(grandchild, signal.SIGKILL)
        assert signals.exists(grandchild)
        assert signals.send(held, signal.SIGKILL)
        parent.kill()
        os.close(held)


def test_a_pidfd_of_a_reaped_child_gets_no_signal(child: int) -> None:
    held = os.pidfd_open(child)
    assert signals.send(held, signal.SIGKILL)
    os.waitpid(child, 0)
    assert not signals.send(held, signal.SIGKILL)
    os.close(held)


def test_unused_process_numbers_do_not_exist_and_get_no_signal() -> None:
    assert not signals.exists(MANY)
    assert not signals.exists(1 << 70)
    assert not signals.send_to_child(MANY, signal.SIGKILL)
    assert signals.exists(os.getpid())


def test_a_signal_to_this_process_is_delivered() -> None:
    got = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: got.append(number))
    try:
        signals.send_to_self(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert got == [signal.SIGUSR1]

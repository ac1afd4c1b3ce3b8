"""Signals to processes: sent to descriptors of them, and nowhere else in gpuhook.

A number of a process that has ended is another's soon: on a busy node within seconds. A descriptor
(pidfd) is never another's. So whoever found a process by its number opens it, looks then whether
it is the one that is meant, and sends to what is open. A test forbids kill(2) elsewhere.

Sources: pidfd_open(2), pidfd_send_signal(2), waitid(2).
"""

import _signal  # type: ignore[import-not-found]
import os


def send(process: int, number: int) -> bool:
    """Send a signal to an open process; False where it has ended."""
    try:
        _signal.pidfd_send_signal(process, number)
    except ProcessLookupError:
        return False
    return True


def send_to_child(pid: int, number: int) -> bool:
    """Send a signal to a child that nobody has waited for; False where it is no child (any more).

    One that has ended keeps its number until then, and what has the number since is no child.
    """
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        # protects: own-child
        os.waitid(os.P_PIDFD, process, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return send(process, number)
    except ChildProcessError:
        return False
    finally:
        os.close(process)


def send_to_self(number: int) -> None:
    """Send a signal to this process."""
    process = os.pidfd_open(os.getpid())
    try:
        send(process, number)
    finally:
        os.close(process)


def exists(pid: int) -> bool:
    """Tell whether some process has this number; one that can't be told of counts as there."""
    try:
        os.close(os.pidfd_open(pid))
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True
    return True

"""Signals to processes, sent through pidfds; no other module of gpuhook sends signals.

The kernel soon reuses the pid of an exited process: on a busy node within seconds. A pidfd never
refers to another process. So a caller that finds a process by its pid opens it, then checks that
it is the intended one, and signals the open pidfd. A test forbids kill(2) elsewhere.

Sources: pidfd_open(2), pidfd_send_signal(2), waitid(2).
"""

import _signal  # type: ignore[import-not-found]
import os


def send(process: int, number: int) -> bool:
    """Send a signal to an open process; False if it has exited."""
    try:
        _signal.pidfd_send_signal(process, number)
    except ProcessLookupError:
        return False
    return True


def send_to_child(pid: int, number: int) -> bool:
    """Send a signal to a child that wasn't waited for yet; False if it isn't a child (any more).

    An exited child keeps its pid until it is waited for; a later owner of the pid isn't a child.
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
    """Tell whether a process with this pid exists; True if that can't be determined."""
    try:
        os.close(os.pidfd_open(pid))
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True
    return True

"""A limit for what must not wait: generous, because machines are busy or emulated."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

SECONDS = 300


@contextmanager
def in_time(seconds: int = SECONDS) -> Iterator[None]:
    """Fail, from the signal handler and so in the midst of a call that waits, when time is up."""

    def fail(*_: object) -> None:
        raise AssertionError(f"it still waits after {seconds} s")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)

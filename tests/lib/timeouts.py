"""A time limit for calls that must not wait: generous, because test hosts are busy or emulated."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

SECONDS = 300


@contextmanager
def in_time(seconds: int = SECONDS) -> Iterator[None]:
    """Fail when the time is up, from the signal handler, so that a waiting call is interrupted."""

    def fail(*_: object) -> None:
        raise AssertionError(f"it still waits after {seconds} s")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)

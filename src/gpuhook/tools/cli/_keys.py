"""Keys and signals that a view on the whole terminal waits for between two looks."""

import contextlib
import os
import select
import signal
import sys
import termios
import tty
from types import TracebackType
from typing import Any, Self

_NUMBERS = (signal.SIGWINCH, signal.SIGTSTP)


class Keys:
    """Have keys come one by one, unseen, for a block; what ``wait`` returns is all that comes.

    Signals that change the view are blocked but while it waits, so they interrupt nothing else.
    Where standard input is no terminal, or another program's in the foreground, no key comes.
    """

    def __init__(self) -> None:
        self._terminal: int | None = None
        self._before: list[Any] | None = None

    def __enter__(self) -> Self:
        signal.pthread_sigmask(signal.SIG_BLOCK, _NUMBERS)
        self._woken, self._wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._handlers = {each: signal.signal(each, lambda *_: None) for each in _NUMBERS}
        self._wakeup = signal.set_wakeup_fd(self._wakes, warn_on_full_buffer=False)
        self.take()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.give_back()
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        os.close(self._woken)
        os.close(self._wakes)

    def take(self) -> None:
        """Have keys come one by one, if the terminal is ours."""
        with contextlib.suppress(OSError, ValueError, termios.error):
            terminal = sys.stdin.fileno()
            if os.tcgetpgrp(terminal) == os.getpgrp():
                self._before = termios.tcgetattr(terminal)
                tty.setcbreak(terminal, termios.TCSANOW)
                self._terminal = terminal

    def give_back(self) -> None:
        """Put the terminal in the order that it was in."""
        if self._terminal is not None and self._before is not None:
            with contextlib.suppress(termios.error):
                termios.tcsetattr(self._terminal, termios.TCSANOW, self._before)
        self._terminal = None

    def wait(self, seconds: float) -> str | int | None:
        """Return a key or a signal's number as soon as one comes, None after so many seconds."""
        readers = [self._woken, *([] if self._terminal is None else [self._terminal])]
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _NUMBERS)
        try:
            ready, _, _ = select.select(readers, [], [], seconds)
        finally:
            signal.pthread_sigmask(signal.SIG_BLOCK, _NUMBERS)
        if self._woken in ready:
            numbers = os.read(self._woken, 512)
            return signal.SIGTSTP if signal.SIGTSTP in numbers else signal.SIGWINCH
        if ready and self._terminal is not None:
            return self._key(self._terminal)
        return None

    def _key(self, terminal: int) -> str | None:
        try:
            typed = os.read(terminal, 1)
        except OSError:
            typed = b""
        if not typed:  # the terminal is gone, or at its end: it would always be ready
            self.give_back()
            return None
        return typed.decode("ascii", "replace")

"""Keys and signals that a full-screen view waits for between two updates."""

import contextlib
import os
import select
import signal
import sys
import termios
import tty
from types import TracebackType
from typing import Any, Self

UP, DOWN, PAGE_UP, PAGE_DOWN, HOME, END = "up", "down", "page-up", "page-down", "home", "end"
# What terminals send after ESC for these keys, in normal and application mode.
_SEQUENCES = {
    b"[A": UP, b"OA": UP, b"[B": DOWN, b"OB": DOWN, b"[5~": PAGE_UP, b"[6~": PAGE_DOWN,
    b"[H": HOME, b"OH": HOME, b"[1~": HOME, b"[7~": HOME,
    b"[F": END, b"OF": END, b"[4~": END, b"[8~": END,
}  # fmt: skip
_ESCAPE = b"\x1b"
_LONGEST = 16  # bytes of a sequence
_NUMBERS = (signal.SIGWINCH, signal.SIGTSTP)


class Keys:
    """Context that reads single keys without echo; ``wait`` returns each key or signal.

    Signals that change the view are blocked except in ``wait``, so they interrupt nothing else.
    No key arrives if standard input isn't a terminal, or this program isn't in its foreground.
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
        """Switch the terminal to single keys, if this program is in its foreground."""
        with contextlib.suppress(OSError, ValueError, termios.error):
            terminal = sys.stdin.fileno()
            if os.tcgetpgrp(terminal) == os.getpgrp():
                self._before = termios.tcgetattr(terminal)
                tty.setcbreak(terminal, termios.TCSANOW)
                self._terminal = terminal

    def give_back(self) -> None:
        """Restore the terminal's settings."""
        if self._terminal is not None and self._before is not None:
            with contextlib.suppress(termios.error):
                termios.tcsetattr(self._terminal, termios.TCSANOW, self._before)
        self._terminal = None

    def wait(self, seconds: float) -> str | int | None:
        """Return the next key or signal number, None after a timeout in seconds."""
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
        typed = self._read(terminal)
        if not typed:  # the terminal is gone or at end of file: it would always be readable
            self.give_back()
            return None
        if typed == _ESCAPE:
            return self._sequence(terminal)
        return typed.decode("ascii", "replace")

    def _sequence(self, terminal: int) -> str | None:
        """Return the key of an escape sequence, whose bytes arrive together."""
        found = b""
        while len(found) < _LONGEST and select.select([terminal], [], [], 0)[0]:
            typed = self._read(terminal)
            found += typed
            is_last = len(found) > 1 and b"@" <= typed <= b"~"  # ECMA-48's final bytes
            if not typed or is_last:
                break
        return _SEQUENCES.get(found)

    @staticmethod
    def _read(terminal: int) -> bytes:
        try:
            return os.read(terminal, 1)
        except OSError:
            return b""

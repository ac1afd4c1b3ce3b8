"""Child processes for work that may hang, crash or use memory that a parent shouldn't have.

A talking child and its parent exchange lines of JSON, objects. Times are of the clock that
is passed in, in seconds.
"""

import contextlib
import json
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

from gpuhook.base.container import kernel
from gpuhook.base.errors import GpuhookError
from gpuhook.base.fileio import write_all
from gpuhook.base.host import signals

_PAUSES = (1.0, 30.0)  # seconds before a child is started again: the first and the longest one
_LIVED = 60.0  # seconds after which an end counts as the first one
_REAP = 0.5  # seconds for a killed child to exit
_PAUSE = 0.005
_PIECE = 1 << 20

Clock = Callable[[], float]
Tell = Callable[[str], None]


class BackOff:
    """The delay before the next attempt, in seconds: each time twice as long."""

    def __init__(self, first: float, longest: float) -> None:
        self._first = first
        self._longest = longest
        self.pause = 0.0  # the last one, 0 where the next is the first

    def grow(self) -> float:
        """Return the next pause."""
        self.pause = min(2 * self.pause or self._first, self._longest)
        return self.pause

    def reset(self) -> None:
        """Reset the next pause to the first one."""
        self.pause = 0.0


class Child:
    """A process that is started again when it exits; ``again`` is when, while there is none."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began = 0.0
        self._back_off = BackOff(*_PAUSES)
        self._zombies: list[int] = []
        self.pid = 0
        self.again: float | None = 0.0

    def _note_start(self, pid: int) -> None:
        self.pid, self._began, self.again = pid, self._clock(), None

    def _note_end(self) -> None:
        """Note that it has exited, and when to start it again."""
        now = self._clock()
        if now - self._began >= _LIVED:
            self._back_off.reset()
        self.pid, self.again = 0, now + self._back_off.grow()

    def _kill(self) -> None:
        """Kill it and don't wait: a driver may block its exit for as long as it hangs."""
        if self.pid:
            signals.send_to_child(self.pid, signal.SIGKILL)
            self._zombies.append(self.pid)

    def reap(self) -> int | None:
        """Reap exited processes; return the wait status of the child itself if it has exited."""
        self._zombies = [pid for pid in self._zombies if os.waitpid(pid, os.WNOHANG)[0] == 0]
        if not self.pid:
            return None
        done, status = os.waitpid(self.pid, os.WNOHANG)
        return status if done else None


class Channel:
    """A child's end of the channel to its parent."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def fileno(self) -> int:
        """Return the descriptor, for callers that read and write by other means."""
        return self._fd

    def say(self, line: Mapping[str, Any]) -> None:
        """Send a line; wait until the parent accepts it."""
        write_all(self._fd, json.dumps(line).encode() + b"\n")

    def asked(self) -> Iterator[dict[str, Any]]:
        """Yield the parent's requests, until it closes the channel."""
        with open(self._fd, "rb", closefd=False) as lines:
            yield from map(json.loads, lines)


Work = Callable[[Channel], None]


class JsonLineWorker(Child):
    """A child with a channel; lines of more than ``most`` bytes are skipped."""

    def __init__(self, clock: Clock, most: int) -> None:
        super().__init__(clock)
        self._most = most
        self._fd = -1
        self._buffer = b""

    def fileno(self) -> int:
        """Return the descriptor to read the child's lines from, -1 while there is none."""
        return self._fd

    def _begin(self, work: Work) -> None:
        """Start a child, which does ``work`` and exits."""
        self._fork(lambda fd: _talk(fd, work))

    def _fork(self, run: Callable[[int], NoReturn]) -> None:
        """Start a child, which runs with its end of the channel."""
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            run(theirs.fileno())
        theirs.close()
        ours.setblocking(False)
        self._fd, self._buffer = ours.detach(), b""
        self._note_start(pid)

    def lines(self) -> list[dict[str, Any]]:
        """Return the lines received until now; closes the descriptor at the end of the channel."""
        try:
            data = os.read(self._fd, _PIECE) if self._fd >= 0 else b""
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            self._close()
            return []
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        if len(self._buffer) > self._most:
            self._buffer = b""
        return [line for line in map(_decoded, lines) if line]

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def _give_up(self) -> None:
        """Abandon it, and start it again later."""
        self._kill()
        self._close()
        self._note_end()

    def _end(self) -> None:
        """Kill it, and wait a moment for that: it may hang."""
        self._kill()
        self._close()
        self.pid = 0
        end = time.monotonic() + _REAP
        while self.reap() is None and self._zombies and time.monotonic() < end:
            time.sleep(_PAUSE)

    def _has_spoken(self) -> bool:
        """Tell whether there is unread output."""
        return self._fd >= 0 and bool(select.select([self._fd], [], [], 0)[0])

    def _how_it_ended(self) -> str:
        """Return how a child without further output exited, "" if unknown after a moment."""
        # In case it has only closed its side.
        signals.send_to_child(self.pid, signal.SIGKILL)
        end = time.monotonic() + _REAP
        while (status := self.reap()) is None:
            if time.monotonic() >= end:
                self._zombies.append(self.pid)
                return ""
            time.sleep(_PAUSE)
        return how_ended(status)


def how_ended(status: int) -> str:
    """Return how a child has exited by its wait status: with signal 11, with status 1."""
    code = os.waitstatus_to_exitcode(status)
    return f"with signal {-code}" if code < 0 else f"with status {code}"


def _talk(fd: int, work: Work) -> NoReturn:
    """Run a talking child; an error is its last line, as {"error": text}."""
    status = 1
    talk = Channel(fd)
    try:
        kernel.die_with_parent()
        kernel.keep_only((fd,))
        work(talk)
        status = 0
    except Exception as error:  # noqa: BLE001 - its own process: nothing else would report it
        with contextlib.suppress(OSError):
            talk.say({"error": f"{type(error).__name__}: {error}"})
    finally:
        os._exit(status)


def _decoded(line: bytes) -> dict[str, Any]:
    """Return a line's content; nothing for the partial line of a killed child."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def do(work: Callable[[], bool], seconds: int, tell: Tell, what: str) -> bool:
    """Do something in a child, which then exits; return whether it succeeded in time.

    ``tell`` gets the error, as a sentence about ``what``.
    """
    child = os.fork()
    if child == 0:
        status = 1
        try:
            kernel.die_with_parent()
            kernel.end_after(seconds)
            status = 0 if work() else 1
        except GpuhookError as error:
            tell(f"{what}: {error}")
        except Exception as error:  # noqa: BLE001 - as above
            tell(f"{what}: {type(error).__name__}: {error}")
        finally:
            os._exit(status)
    return kernel.reap(child, seconds + 1.0) == 0

"""A child that is fed: it reads states, a line each, of which the last one counts.

What is written to it never waits for it, and one that takes nothing for too long is killed. It may
ask by lines too, and be answered: answers are never left out, but with the child that asked.
"""

import os
import signal
import socket
from collections.abc import Callable, Collection

from gpuhook.ground.container import kernel
from gpuhook.ground.errors import GpuhookError
from gpuhook.ground.host import signals
from gpuhook.tools.host.child import Clock, Talking, Tell, how_ended

_READING = 30.0  # seconds that it may leave a state unread
_ENDING = 3.0  # seconds to end in when asked to
_LONGEST_LINE = 16 << 20  # bytes of a line of its own

# What it does with the descriptor that it reads from; returns its exit status.
Serve = Callable[[int], int]


class Fed(Talking):
    """A process that does ``serve``. ``title`` is what it is called to a person: The server.

    ``name`` is what the kernel calls it; ``keeps`` are descriptors that it has, too. Lines of its
    own have ``longest`` bytes at most.
    """

    def __init__(
        self,
        serve: Serve,
        title: str,
        name: str,
        tell: Tell,
        clock: Clock,
        keeps: Collection[int] = (),
        longest: int = _LONGEST_LINE,
    ) -> None:
        super().__init__(clock, longest)
        self._keeps = keeps
        self._serve = serve
        self._title = title
        self._name = name
        self._tell = tell
        self._state = b""
        self._rest = b""  # of what has to be written
        self._is_new = False  # whether the state hasn't been begun
        self._stuck = 0.0

    def wants(self) -> int:
        """Return the descriptor to write on when it takes something, -1 if there is nothing."""
        return self._fd if self._rest or self._is_new else -1

    def give(self, state: bytes) -> None:
        """Have it read a state, a line; of several that wait only the last one counts."""
        self._note_waiting()
        self._state, self._is_new = state, True
        self.write()

    def answer(self, line: bytes) -> None:
        """Have it read a line before what waits, if it is still the one that asked."""
        if self._fd >= 0:
            self._note_waiting()
            self._rest += line
            self.write()

    def _note_waiting(self) -> None:
        if self.wants() < 0:
            self._stuck = self._clock()

    def write(self) -> None:
        """Write as much as it takes."""
        while self._fd >= 0 and (self._rest or self._is_new):
            if not self._rest:
                self._rest, self._is_new = self._state, False
            try:
                written = os.write(self._fd, self._rest)
            except BlockingIOError:
                return
            except OSError:  # it has ended: its status says so
                return
            self._rest = self._rest[written:]
            self._stuck = self._clock()

    def deadline(self) -> float | None:
        """Return when something is to be done, None if never."""
        return self._stuck + _READING if self.wants() >= 0 else self.again

    def tend(self) -> bool:
        """Start it where there is none, and end it where it hangs; tell whether it is a new one."""
        status = self.reap()
        if status is not None:
            self._tell(f"{self._title} ended {how_ended(status)}; it is started again")
            self._close()
            self._note_end()
        self.write()  # we may have been busy ourselves
        now = self._clock()
        if self.pid and self.wants() >= 0 and now >= self._stuck + _READING:
            self._tell(f"{self._title} no longer reads; it is started again")
            self._give_up()
        if self.again is None or now < self.again:
            return False
        self._start()
        return True

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            self._be(theirs.detach())
        theirs.close()
        ours.setblocking(False)
        self._note_start(pid)
        self._fd, self._buffer = ours.detach(), b""
        self._rest, self._is_new = b"", bool(self._state)
        self._stuck = self._clock()
        self.write()

    def _be(self, fd: int) -> None:
        """Be the child."""
        status = 1
        try:
            kernel.die_with_parent()  # another child may hold the other end for a while
            start = 3
            for kept in sorted({fd, *self._keeps}):
                os.closerange(start, kept)
                start = kept + 1
            os.closerange(start, os.sysconf("SC_OPEN_MAX"))
            kernel.set_name(self._name)
            status = self._serve(fd)
        except GpuhookError as error:
            self._tell(str(error))
        except Exception as error:  # noqa: BLE001 - a process of its own: nobody else would say it
            self._tell(f"{self._title} failed: {type(error).__name__}: {error}")
        finally:
            os._exit(status)

    def _close(self) -> None:
        super()._close()
        self._rest = b""

    def end(self) -> None:
        """Have it take its leave by SIGTERM, and wait for its end."""
        self._close()
        if not self.pid:
            return
        signals.send_to_child(self.pid, signal.SIGTERM)
        if kernel.reap(self.pid, _ENDING) is None:
            self._kill()
        self.pid = 0

"""A child that reads states from its parent: a line each, of which only the last one counts.

Writing to it never blocks, and one that leaves a state unread for too long is killed. It may
send requests as lines, too: responses are never dropped, except with the child that asked.
"""

import fcntl
import os
import signal
import struct
import termios
from collections.abc import Callable, Collection
from typing import NoReturn

from gpuhook.base.container import kernel
from gpuhook.base.errors import GpuhookError
from gpuhook.base.host import signals
from gpuhook.monitor.host.child import Clock, JsonLineWorker, Tell, how_ended

_READING = 30.0  # seconds that it may leave a state unread
_ENDING = 3.0  # seconds to exit after a request to
_LONGEST_LINE = 16 << 20  # bytes of a line that it sends

# The child's work with the descriptor that it reads from; returns its exit status.
Serve = Callable[[int], int]


class StateWorker(JsonLineWorker):
    """A process that runs ``serve``. ``title`` is its name in messages: The server.

    ``name`` is its process name; ``keeps`` are further descriptors that it inherits. Lines that it
    sends have at most ``longest`` bytes.
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
        self._is_new = False  # whether the state hasn't been started
        self._stuck = 0.0

    def wants(self) -> int:
        """Return the descriptor to write to when it accepts data, -1 if there is nothing."""
        return self._fd if self._rest or self._is_new else -1

    def give(self, state: bytes) -> None:
        """Send a state, a line; of several pending ones only the last one is sent."""
        self._note_waiting()
        self._state, self._is_new = state, True
        self.write()

    def answer(self, line: bytes) -> None:
        """Send a response before pending states, if the child is still the one that asked."""
        if self._fd >= 0:
            self._note_waiting()
            self._rest += line
            self.write()

    def _note_waiting(self) -> None:
        if not self._is_waiting():
            self._stuck = self._clock()

    def _is_waiting(self) -> bool:
        """Tell whether anything is unwritten, or written and unread (SIOCOUTQ, unix(7))."""
        if self._fd < 0 or self.wants() >= 0:
            return self._fd >= 0
        return struct.unpack("i", fcntl.ioctl(self._fd, termios.TIOCOUTQ, b"\0" * 4)) != (0,)

    def write(self) -> None:
        """Write as much as it accepts."""
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
        """Return the time of the next action, None if there is none."""
        return self._stuck + _READING if self._is_waiting() else self.again

    def tend(self) -> bool:
        """Start a missing child, and kill a hung one; tell whether it is a new one."""
        status = self.reap()
        if status is not None:
            self._tell(f"{self._title} ended {how_ended(status)}; it is started again")
            self._close()
            self._note_end()
        self.write()  # we may have been busy ourselves
        now = self._clock()
        if self.pid and now >= self._stuck + _READING and self._is_waiting():
            self._tell(f"{self._title} no longer reads; it is started again")
            self._give_up()
        if self.again is None or now < self.again:
            return False
        self._fork(self._be)
        self._rest, self._is_new = b"", bool(self._state)
        self._stuck = self._clock()
        self.write()
        return True

    def _be(self, fd: int) -> NoReturn:
        """Run the child."""
        status = 1
        try:
            kernel.die_with_parent()  # another child may hold the other end for a while
            kernel.keep_only((0, 1, 2, fd, *self._keeps))
            kernel.set_name(self._name)
            status = self._serve(fd)
        except GpuhookError as error:
            self._tell(str(error))
        except Exception as error:  # noqa: BLE001 - its own process: nothing else would report it
            self._tell(f"{self._title} failed: {type(error).__name__}: {error}")
        finally:
            os._exit(status)

    def _close(self) -> None:
        super()._close()
        self._rest = b""

    def end(self) -> None:
        """Stop it with SIGTERM, and wait for its exit."""
        self._close()
        if not self.pid:
            return
        signals.send_to_child(self.pid, signal.SIGTERM)
        if kernel.reap(self.pid, _ENDING) is None:
            self._kill()
        self.pid = 0

"""Serve the series over HTTP, in one thread that may fork.

Who connects and says nothing, or takes no answer, makes nobody else wait: those who asked while a
look was taken get the next one, all the same.
"""

import contextlib
import functools
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from gpuhook.errors import MetricsError, shown
from gpuhook.metrics import exporter
from gpuhook.metrics.model import Snapshot
from gpuhook.metrics.observer import Observer
from gpuhook.metrics.telemetry import PATIENCE

IDLE = 120.0  # seconds without a request after which the drivers are let go
AWAY = 30.0  # seconds for which they are let go on SIGHUP
_PATIENCE = 5.0  # seconds that a request may take to come, and its answer to be taken
_LIMIT = 1 << 14  # bytes of a request
_WAITING = 32  # connections, of which the oldest goes where there are more
_END = b"\r\n\r\n"  # of a request

Tell = Callable[[str], None]


def listen(address: str) -> socket.socket:
    """Return a socket that listens at HOST:PORT; MetricsError where that can't be."""
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise MetricsError(
            f"{shown(address)} isn't an address", "Give one like 127.0.0.1:9836 to --listen"
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, int(port)))
        listener.listen(_WAITING)
    except OSError as error:
        listener.close()
        raise MetricsError(
            f"Nothing can listen at {address}: {error.strerror or error}",
            "Stop what listens there, or give another address to --listen",
        ) from None
    listener.setblocking(False)
    return listener


class Service:
    """Answers requests until a signal says to end; SIGHUP lets go of the drivers."""

    def __init__(self, observer: Observer, options: exporter.Options, tell: Tell) -> None:
        self._observer = observer
        self._options = options
        self._tell = tell
        self._problems: tuple[str, ...] = ()
        self._ends = False
        self._lets_go = False

    def run(self, listener: socket.socket) -> None:
        """Serve until SIGTERM or SIGINT comes."""
        with _signals(self._note) as woken, contextlib.closing(_Clients(listener)) as clients:
            last: float | None = None
            self._observer.prepare(PATIENCE)
            while not self._ends:
                asked = clients.wait(woken, None if last is None else last + IDLE)
                if self._lets_go:
                    self._lets_go, last = False, None
                    self._observer.let_go(AWAY)
                elif last is not None and not asked and time.monotonic() >= last + IDLE:
                    last = None
                    self._observer.let_go()
                if asked:
                    self._answer_all(asked)
                    self._observer.prepare()  # nobody waits for that
                    last = time.monotonic()
            self._observer.let_go()

    def _note(self, number: int) -> None:
        if number == signal.SIGHUP:
            self._lets_go = True
        else:
            self._ends = True

    def _answer_all(self, asked: Iterable["_Client"]) -> None:
        """Answer whole requests; there is one look for all of them."""
        look = functools.cache(self._look)
        for client in asked:
            request = client.request.decode("latin-1")
            status, content_type, body = self._answer(request, look)
            head = (
                f"HTTP/1.0 {status}\r\nContent-Type: {content_type}\r\n"
                f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            )
            client.give(head.encode() + (b"" if request.startswith("HEAD ") else body))

    def _answer(
        self, request: str, look: Callable[[], tuple[Snapshot, float]]
    ) -> tuple[str, str, bytes]:
        words = request.partition("\r\n")[0].split(" ")
        plain = "text/plain; charset=utf-8"
        if len(words) != 3 or words[0] not in ("GET", "HEAD"):
            return "405 Method Not Allowed", plain, b"This only answers GET.\n"
        if words[1].partition("?")[0] != "/metrics":
            return "404 Not Found", plain, b"The metrics are at /metrics.\n"
        snapshot, seconds = look()
        accept = _header(request, "accept")
        return "200 OK", *exporter.text(snapshot, self._options, seconds, accept)[::-1]

    def _look(self) -> tuple[Snapshot, float]:
        """Return a look and how many seconds it took; tell what else is missing than before."""
        before = time.monotonic()
        snapshot = self._observer.take()
        if snapshot.problems != self._problems:
            for problem in snapshot.problems:
                self._tell(problem)
            self._problems = snapshot.problems
        return snapshot, time.monotonic() - before


class _Client:
    """A connection on which a request comes and then its answer goes; it never waits for either."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._answer: memoryview | None = None  # the rest of it
        self._is_broken = False
        self.end = time.monotonic() + _PATIENCE
        self.request = b""

    def fileno(self) -> int:
        """Return its descriptor, for select."""
        return self._socket.fileno()

    @property
    def is_whole(self) -> bool:
        """Whether its request has come and has no answer yet."""
        return self._answer is None and not self._is_broken and _END in self.request

    @property
    def is_answered(self) -> bool:
        """Whether there is an answer, which it takes, or has taken."""
        return self._answer is not None

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come or go."""
        return self._is_broken or (self._answer is not None and not self._answer)

    def give(self, answer: bytes) -> None:
        """Begin to send the answer."""
        self._answer = memoryview(answer)
        self.end = time.monotonic() + _PATIENCE
        self.go_on()

    def go_on(self) -> None:
        """Receive or send what is possible now."""
        try:
            if self._answer is not None:
                self._answer = self._answer[self._socket.send(self._answer) :]
            elif not self.is_whole:
                piece = self._socket.recv(_LIMIT)
                self.request += piece
                self._is_broken = not piece or len(self.request) > _LIMIT
        except BlockingIOError:
            pass
        except OSError:
            self._is_broken = True

    def close(self) -> None:
        """End it."""
        self._socket.close()


class _Clients:
    """Those who are connected."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._open: list[_Client] = []

    def wait(self, woken: int, end: float | None) -> list[_Client]:
        """Return the whole requests that there are, none where a signal came or at the end.

        ``woken`` is where a byte comes with a signal, ``end`` a time, None for never.
        """
        ends = [each.end for each in self._open] + ([] if end is None else [end])
        patience = max(0.0, min(ends) - time.monotonic()) if ends else None
        takers = [each for each in self._open if each.is_answered]
        others = [each for each in self._open if not each.is_answered]
        readers: list[Any] = [self._listener, woken, *others]
        came = select.select(readers, takers, [], patience)
        for each in (*came[0], *came[1]):
            if isinstance(each, _Client):
                each.go_on()
        if self._listener in came[0]:
            self._accept()
        if woken in came[0]:
            with contextlib.suppress(BlockingIOError):
                os.read(woken, 1 << 10)
        now = time.monotonic()
        self._drop(each for each in self._open if now >= each.end and not each.is_whole)
        return [each for each in self._open if each.is_whole]

    def _accept(self) -> None:
        """Take those who wait to be connected, with what they have said already."""
        for _ in range(_WAITING):
            try:
                client = _Client(self._listener.accept()[0])
            except OSError:
                break
            client.go_on()
            self._open.append(client)
        slow = [each for each in self._open if not each.is_whole]
        self._drop(slow[: max(0, len(self._open) - _WAITING)])

    def _drop(self, some: Iterable[_Client]) -> None:
        """Close the connections of some, and those that are over."""
        gone = {*some, *(each for each in self._open if each.is_over)}
        for each in gone:
            each.close()
        self._open = [each for each in self._open if each not in gone]

    def close(self) -> None:
        """Close all connections."""
        self._drop([*self._open])


@contextlib.contextmanager
def _signals(note: Callable[[int], None]) -> Iterator[int]:
    """Call ``note`` with each signal; give a descriptor that there is something to read from."""
    reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    handlers = {each: signal.signal(each, lambda number, _: note(number)) for each in numbers}
    try:
        yield reader
    finally:
        signal.set_wakeup_fd(before)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.close(reader)
        os.close(writer)


def _header(request: str, name: str) -> str:
    """Return the values of a header, joined by commas."""
    lines = [line.partition(":") for line in request.split("\r\n")[1:]]
    return ",".join(value.strip() for key, _, value in lines if key.strip().lower() == name)

"""Serve the series over HTTP, one request after the other, in one thread that may fork."""

import contextlib
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator

from gpuhook.errors import MetricsError, shown
from gpuhook.metrics import exporter
from gpuhook.metrics.observer import Observer
from gpuhook.metrics.telemetry import PATIENCE

IDLE = 120.0  # seconds without a request after which the drivers are let go
AWAY = 30.0  # seconds for which they are let go on SIGHUP
_REQUEST = 2.0  # seconds that a request may take to come, and its answer to be taken
_LIMIT = 1 << 14  # bytes of a request
_WAITING = 32  # connections

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
        with _signals(self._note) as woken:
            last: float | None = None
            self._observer.prepare(PATIENCE)
            while not self._ends:
                patience = None if last is None else max(0.0, last + IDLE - time.monotonic())
                ready = select.select([listener.fileno(), woken], [], [], patience)[0]
                if woken in ready:
                    with contextlib.suppress(BlockingIOError):
                        os.read(woken, 1 << 10)
                if self._lets_go:
                    self._lets_go, last = False, None
                    self._observer.let_go(AWAY)
                elif not ready:
                    last = None
                    self._observer.let_go()
                if listener.fileno() in ready:
                    with contextlib.suppress(OSError):
                        self._serve(listener.accept()[0])
                    self._observer.prepare()  # nobody waits for that
                    last = time.monotonic()
            self._observer.let_go()

    def _note(self, number: int) -> None:
        if number == signal.SIGHUP:
            self._lets_go = True
        else:
            self._ends = True

    def _serve(self, connection: socket.socket) -> None:
        """Answer one request; OSError where the other side doesn't take it."""
        with connection:
            request = _request(connection)
            status, content_type, body = self._answer(request)
            head = (
                f"HTTP/1.0 {status}\r\nContent-Type: {content_type}\r\n"
                f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            )
            connection.settimeout(_REQUEST)
            is_head = request.startswith("HEAD ")
            connection.sendall(head.encode() + (b"" if is_head else body))

    def _answer(self, request: str) -> tuple[str, str, bytes]:
        words = request.partition("\r\n")[0].split(" ")
        plain = "text/plain; charset=utf-8"
        if len(words) != 3 or words[0] not in ("GET", "HEAD"):
            return "405 Method Not Allowed", plain, b"This only answers GET.\n"
        if words[1].partition("?")[0] != "/metrics":
            return "404 Not Found", plain, b"The metrics are at /metrics.\n"
        return "200 OK", *self._metrics(_header(request, "accept"))[::-1]

    def _metrics(self, accept: str) -> tuple[bytes, str]:
        before = time.monotonic()
        snapshot = self._observer.take()
        if snapshot.problems != self._problems:
            for problem in snapshot.problems:
                self._tell(problem)
            self._problems = snapshot.problems
        return exporter.text(snapshot, self._options, time.monotonic() - before, accept)


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


def _request(connection: socket.socket) -> str:
    """Return a request up to its empty line; OSError if it is too slow or too long."""
    end = time.monotonic() + _REQUEST
    data = b""
    while b"\r\n\r\n" not in data:
        patience = end - time.monotonic()
        if patience <= 0 or len(data) > _LIMIT:
            raise TimeoutError
        connection.settimeout(patience)
        piece = connection.recv(_LIMIT)
        if not piece:
            raise ConnectionError
        data += piece
    return data.decode("latin-1")


def _header(request: str, name: str) -> str:
    """Return the values of a header, joined by commas."""
    lines = [line.partition(":") for line in request.split("\r\n")[1:]]
    return ",".join(value.strip() for key, _, value in lines if key.strip().lower() == name)

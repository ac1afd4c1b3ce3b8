"""Serve the series over HTTP, in one thread that may fork.

Who connects and says nothing, or takes no answer, makes nobody else wait: those who asked while a
look was taken get the next one, all the same. Whatever a request says, it has an answer, and the
service goes on.
"""

import contextlib
import functools
import os
import re
import select
import signal
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from gpuhook.ground.errors import MetricsError, shown
from gpuhook.tools.metrics import exporter, text
from gpuhook.tools.metrics.model import Snapshot
from gpuhook.tools.metrics.observer import Observer
from gpuhook.tools.metrics.telemetry import PATIENCE
from gpuhook.tools.metrics.web_config import Web

IDLE = 120.0  # seconds without a request after which the drivers are let go
AWAY = 30.0  # seconds for which they are let go on SIGHUP
_PATIENCE = 5.0  # seconds that a whole request may take to come, and its answer to be taken
_LIMIT = 1 << 14  # bytes of a request
_WAITING = 32  # connections
_PAUSE = 0.1  # seconds, where no connection can be had

_END = re.compile(rb"\r?\n\r?\n")  # RFC 9112, 2.2: a lone line feed may end a line
_VERSION = re.compile(rb"HTTP/1\.[0-9]", re.IGNORECASE)
_VISIBLE = bytes(range(0x21, 0x7F))
_BEFORE_HOST = b"http://"

_PLAIN = "text/plain; charset=utf-8"
_DENIED = "401 Unauthorized"
_FAILED = b"The metrics could not be had, for a reason that the service's log has.\n"

Tell = Callable[[str], None]
Answer = tuple[str, str, bytes]  # status, content type, body
Metrics = Callable[[bool], Answer]  # as OpenMetrics or not


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
    """Answers requests until a signal says to end; SIGHUP releases the drivers.

    ``web`` has TLS and passwords, None for neither.
    """

    def __init__(
        self,
        observer: Observer,
        options: exporter.SeriesOptions,
        tell: Tell,
        web: Web | None = None,
    ) -> None:
        self._web = web
        self._observer = observer
        self._options = options
        self._tell = tell
        self._problems: tuple[str, ...] = ()
        self._ends = False
        self._lets_go = False

    def run(self, listener: socket.socket) -> None:
        """Serve until SIGTERM or SIGINT comes."""
        with (
            _signals(self._note) as woken,
            contextlib.closing(_Clients(listener, self._web)) as clients,
        ):
            last: float | None = None
            self._prepare(PATIENCE)
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
                    self._prepare()  # nobody waits for that
                    last = time.monotonic()
            self._observer.let_go()

    def _note(self, number: int) -> None:
        if number == signal.SIGHUP:
            self._lets_go = True
        else:
            self._ends = True

    def _prepare(self, patience: float = 0.0) -> None:
        with self._told_of_failures("The next look couldn't be prepared"):
            self._observer.prepare(patience)

    def _answer_all(self, asked: Iterable["_Client"]) -> None:
        """Answer requests; there is one look for all of them, and one text of each format."""
        look = functools.cache(self._look)
        metrics = functools.cache(lambda openmetrics: self._metrics(look, openmetrics))
        written = functools.cache(_written)
        for client in asked:
            answer = _answer(client.request, metrics, self._web)
            client.give(written(answer, has_body=not client.request.startswith(b"HEAD ")))

    def _metrics(
        self, look: Callable[[], tuple[Snapshot, float] | None], openmetrics: bool
    ) -> Answer:
        found = look()
        if found is not None:
            snapshot, seconds = found
            with self._told_of_failures("The metrics couldn't be written"):
                body = exporter.text(snapshot, self._options, seconds, openmetrics=openmetrics)
                return "200 OK", text.TYPES[openmetrics], body
        return "500 Internal Server Error", _PLAIN, _FAILED

    def _look(self) -> tuple[Snapshot, float] | None:
        """Return a look and how many seconds it took; tell what else is missing than before."""
        before = time.monotonic()
        with self._told_of_failures("The devices couldn't be looked at"):
            snapshot = self._observer.take()
            self._tell_news((*snapshot.problems, *snapshot.notes))
            return snapshot, time.monotonic() - before
        return None

    @contextlib.contextmanager
    def _told_of_failures(self, what: str) -> Iterator[None]:
        """Tell what fails, and go on: the next request may do better."""
        try:
            yield
        # protects: failing-request
        except Exception as error:  # noqa: BLE001 - no request ends the service
            self._tell_news((f"{what}: {shown(f'{type(error).__name__}: {error}')}",))

    def _tell_news(self, problems: tuple[str, ...]) -> None:
        if problems != self._problems:
            for problem in problems:
                self._tell(problem)
            self._problems = problems


def _written(answer: Answer, *, has_body: bool) -> bytes:
    status, content_type, body = answer
    head = (
        f"HTTP/1.0 {status}\r\nContent-Type: {content_type}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n"
    )
    if status == _DENIED:
        head += 'WWW-Authenticate: Basic realm="gpuhook", charset="UTF-8"\r\n'
    return f"{head}\r\n".encode() + (body if has_body else b"")


def _answer(request: bytes, metrics: Metrics, web: Web | None) -> Answer:
    """Return the answer to what was received of a request."""
    if len(request) > _LIMIT:
        return "431 Request Header Fields Too Large", _PLAIN, b"This request is too long.\n"
    first = _first(request)
    if first is None:
        return "400 Bad Request", _PLAIN, b"This isn't a request of HTTP/1.0 or 1.1.\n"
    # protects: web-password
    if web is not None and not web.allows(_header(request, b"authorization")):
        return _DENIED, _PLAIN, b"This needs a name and a password that are known here.\n"
    method, path = first
    if method not in (b"GET", b"HEAD"):
        return "405 Method Not Allowed", _PLAIN, b"This only answers GET.\n"
    if path.partition(b"?")[0] != b"/metrics":
        return "404 Not Found", _PLAIN, b"The metrics are at /metrics.\n"
    return metrics(text.is_openmetrics(_header(request, b"accept")))


def _first(request: bytes) -> tuple[bytes, bytes] | None:
    """Return the method and the path that a request begins with, None where it doesn't.

    The path may have its host before it (RFC 9112, 3.2.2).
    """
    line, end, _ = request.partition(b"\n")
    words = line.removesuffix(b"\r").split(b" ")
    if not end or len(words) != 3 or not _VERSION.fullmatch(words[2]):
        return None
    method, path, _ = words
    if not method or (method + path).translate(None, _VISIBLE):
        return None
    if path[: len(_BEFORE_HOST)].lower() == _BEFORE_HOST:
        _, slash, rest = path[len(_BEFORE_HOST) :].partition(b"/")
        path = slash + rest
    return method, path


class _Client:
    """A connection on which a request comes and then its answer goes; it never waits for either.

    ``peer`` is the address of who has made it.
    """

    def __init__(self, connection: socket.socket, peer: str) -> None:
        self._socket = connection  # which never waits
        self._answer: memoryview | None = None  # the rest of it
        self._asks_to_send = False  # TLS does, before it can receive
        self.is_over = False  # nothing more will come or go
        self.peer = peer
        self.end = time.monotonic() + _PATIENCE
        self.request = b""

    def fileno(self) -> int:
        """Return its descriptor, for select."""
        return self._socket.fileno()

    @property
    def is_whole(self) -> bool:
        """Whether as much of its request has come as an answer needs, and it has none yet."""
        if self._answer is not None or self.is_over:
            return False
        if len(self.request) > _LIMIT or _END.search(self.request):
            return True
        return b"\n" in self.request and _first(self.request) is None

    @functools.cached_property
    def password(self) -> str:
        """What its whole request says of a user and a password."""
        return _header(self.request, b"authorization")

    @property
    def takes(self) -> bool:
        """Whether there is more of an answer to send."""
        return bool(self._answer) or self._asks_to_send

    def give(self, answer: bytes) -> None:
        """Begin to send the answer."""
        self._answer = memoryview(answer)
        self.end = time.monotonic() + _PATIENCE
        self.go_on()

    def go_on(self) -> None:
        """Receive or send what is possible now."""
        self._asks_to_send = False
        try:
            if self._answer:
                self._answer = self._answer[self._socket.send(self._answer) :]
                if not self._answer:
                    self._say_end()
            elif not self.is_whole:
                piece = self._socket.recv(_LIMIT)
                # What comes after the answer is read too: if it weren't, closing would reset the
                # connection, and the client could lose the answer (RFC 9112, 9.6).
                self.request += piece if self._answer is None else b""
                self.is_over = not piece
        except ssl.SSLWantWriteError:
            self._asks_to_send = True
        except (BlockingIOError, ssl.SSLWantReadError):
            pass
        except OSError:
            self.is_over = True

    def _say_end(self) -> None:
        """Say that nothing more will be sent."""
        if isinstance(self._socket, ssl.SSLSocket):
            with contextlib.suppress(ssl.SSLWantReadError):  # the peer's own end isn't waited for
                self._socket.unwrap()
        else:
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """End it."""
        self._socket.close()


class _Clients:
    """Those who are connected."""

    def __init__(self, listener: socket.socket, web: Web | None) -> None:
        self._listener = listener
        self._web = web
        self._open: list[_Client] = []

    def wait(self, woken: int, end: float | None) -> list[_Client]:
        """Return the whole requests to answer now, none where a signal came or at the end.

        ``woken`` is where a byte comes with a signal, ``end`` a time, None for never.
        """
        ends = [each.end for each in self._open] + ([] if end is None else [end])
        patience = max(0.0, min(ends) - time.monotonic()) if ends else None
        if any(each.is_whole for each in self._open):  # it has been put off
            patience = 0.0
        takers = [each for each in self._open if each.takes]
        others = [each for each in self._open if not each.takes]
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
        # protects: slow-connection
        self._drop(each for each in self._open if now >= each.end and not each.is_whole)
        return self._due()

    def _due(self) -> list[_Client]:
        """Return whom to answer now: those whose passwords are remembered, and then one other.

        The check of a password takes long: before the next one there is a look at who has come.
        """
        whole = [each for each in self._open if each.is_whole]
        checked = [each for each in whole if self._is_checked(each)]
        # protects: one-check-at-once
        return [each for each in whole if each not in checked] + checked[:1]

    def _is_checked(self, client: _Client) -> bool:
        """Tell whether a whole request has a password that isn't remembered."""
        return self._web is not None and not self._web.remembers(client.password)

    def _accept(self) -> None:
        """Take those who wait to be connected, with what they have said already."""
        for _ in range(_WAITING):
            try:
                connection, address = self._listener.accept()
            except (BlockingIOError, ConnectionError):
                break
            except OSError:  # no descriptor or no memory for it
                gone = self._slow()
                self._drop(gone)
                if not gone:
                    time.sleep(_PAUSE)
                break
            try:
                connection = self._dressed(connection)
            except OSError:  # it has gone again
                connection.close()
                continue
            client = _Client(connection, str(address[0]))
            client.go_on()
            self._open.append(client)
            if len(self._open) > _WAITING:
                self._drop(self._slow())

    def _dressed(self, connection: socket.socket) -> socket.socket:
        """Return a connection that never waits, with TLS where that is asked for."""
        if self._web is not None:
            return self._web.wrap(connection)
        connection.setblocking(False)
        return connection

    def _slow(self) -> list[_Client]:
        """Return the oldest of the peer that has most, of those that aren't answered at once."""
        slow = [each for each in self._open if not each.is_whole or self._is_checked(each)]
        counts = Counter(each.peer for each in slow)
        # protects: many-connections
        return [max(slow, key=lambda each: counts[each.peer])] if slow else []

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


def _header(request: bytes, name: bytes) -> str:
    """Return the values of a header, joined by commas."""
    lines = [line.partition(b":") for line in _END.split(request, 1)[0].split(b"\n")[1:]]
    values = [value.strip() for key, _, value in lines if key.lower() == name]
    return b",".join(values).decode("latin-1")

"""A client of Kubernetes' API server: HTTPS with Python's standard library, a connection a request.

The package ``kubernetes`` isn't used. It has a class for every object of every API, and its import
takes 25 MiB more than this module with its imports; all processes together may have 60 (44 against
19 MiB resident, with its version 37 and Python 3.11; 50 against 22 with a client created). gpuhook
needs only four kinds of objects, and uses their JSON.

Each request has one deadline for its whole exchange. The client follows no redirects and uses no
proxies, so that a token goes only to the API server. No error message contains a token.
"""

import http.client
import io
import json
import re
import select
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote, urlencode

from gpuhook import __version__
from gpuhook.base.errors import PluginError, printable
from gpuhook.cluster.dra.access import Access

Clock = Callable[[], float]
Object = dict[str, Any]

APPLY = "application/apply-patch+yaml"  # JSON is valid YAML
MERGE = "application/merge-patch+json"
_JSON = "application/json"
_PATIENCE = 10.0  # seconds for a request, by default
_MOST = 16 << 20  # bytes of a response
_LONGEST_LINE = 4 << 20  # bytes of an event; etcd stores no object of more than 1.5 MiB
_PIECE = 64 << 10
_LONGEST_REASON = 400  # characters of a server's error message
_PAUSES = (0.2, 5.0)  # seconds until a request is repeated: the first pause, the longest
_LONGEST_PAUSE = 300.0  # seconds; a longer pause that a server requests is cut to this
_KEEP_ALIVE = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 20), (socket.TCP_KEEPCNT, 3))
_AGAIN = (0, 408, 429, 500, 502, 503, 504)  # 0: no connection, or a truncated response
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_REMEDY = "Check the rights of gpuhook's account, and the API server's address"


class ApiError(PluginError):
    """A failed request.

    ``status`` is HTTP's, 0 without a response; ``reason`` is Kubernetes' reason code; ``pause`` is
    the number of seconds that the server asks to wait before a retry, 0 if it doesn't say.
    """

    def __init__(self, cause: str, status: int = 0, reason: str = "", pause: float = 0.0) -> None:
        super().__init__(cause, _REMEDY)
        self.status = status
        self.reason = reason
        self.pause = pause

    @property
    def may_pass(self) -> bool:
        """True if the same request may succeed later."""
        return self.status in _AGAIN


class ApiClient:
    """A client of one API server. Several threads may use it at once.

    ``asked`` counts requests, including failed ones.
    """

    def __init__(
        self,
        access: Access,
        clock: Clock = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.access = access
        self.asked = 0
        self._clock = clock
        self._sleep = sleep

    def ask(
        self,
        method: str,
        path: str,
        body: Object | None = None,
        *,
        query: Mapping[str, str] | None = None,
        kind: str = _JSON,
        patience: float = _PATIENCE,
    ) -> Object:
        """Return the object in the response; ApiError if there is none within ``patience`` seconds.

        ``kind`` is the body's content type: JSON, APPLY or MERGE.
        """
        exchange = _Exchange(self, self._clock() + patience)
        try:
            response = exchange.send(method, path, body, query, kind)
            return exchange.object_of(method, path, response)
        finally:
            exchange.close()

    def insist(self, method: str, path: str, patience: float) -> Object:
        """Return the object in the response, repeating the request after temporary errors.

        ApiError after ``patience`` seconds in all, at the latest.
        """
        end, pause = self._clock() + patience, _PAUSES[0]
        while True:
            try:
                return self.ask(method, path, patience=max(0.01, end - self._clock()))
            except ApiError as error:
                wait = max(error.pause, pause)
                if not error.may_pass or self._clock() + wait >= end:
                    raise
            self._sleep(wait)
            pause = min(2 * pause, _PAUSES[1])

    def watch(
        self, path: str, query: Mapping[str, str], patience: float = _PATIENCE
    ) -> "WatchStream":
        """Return a started watch; ApiError if it doesn't start within ``patience`` seconds."""
        exchange = _Exchange(self, self._clock() + patience, piecewise=True)
        try:
            response = exchange.send("GET", path, None, {**query, "watch": "true"}, _JSON)
            if response.status != 200:
                exchange.object_of("GET", path, response)
                raise ApiError(f"The API server answers a watch with status {response.status}")
            return WatchStream(exchange.keep(), chunked=bool(response.chunked))
        except BaseException:
            exchange.close()
            raise


class _Exchange:
    """One request and its response over a separate connection, with one deadline."""

    def __init__(self, client: ApiClient, end: float, *, piecewise: bool = False) -> None:
        self._client = client
        self._access = client.access
        self._clock = client._clock  # noqa: SLF001 - a part of the client
        self._end = end
        self._piecewise = piecewise
        self._sockets: list[ssl.SSLSocket] = []  # one at most
        self._token = ""

    def send(
        self,
        method: str,
        path: str,
        body: Object | None,
        query: Mapping[str, str] | None,
        kind: str,
    ) -> http.client.HTTPResponse:
        """Return the start of the response; ApiError if there is none in time."""
        access = self._access
        self._client.asked += 1
        self._token = access.token()
        context = access.context()
        headers = {"Accept": _JSON, "User-Agent": f"gpuhook/{__version__}", "Connection": "close"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        if body is not None:
            headers["Content-Type"] = kind
        where = access.prefix + path + (f"?{urlencode(query)}" if query else "")
        try:
            self._sockets = [self._connect(context)]
            timed = _DeadlineConnection(
                self._sockets[0], self._end, self._clock, piecewise=self._piecewise
            )
            connection = http.client.HTTPConnection(access.host, access.port)
            connection.auto_open = 0
            connection.sock = timed  # it has all methods of a socket that http.client uses
            text = None if body is None else json.dumps(body, separators=(",", ":")).encode()
            connection.request(method, where, text, headers)
            return connection.getresponse()
        # ValueError: name resolution got an invalid host name.
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise self._unreachable(error) from None

    def object_of(self, method: str, path: str, response: http.client.HTTPResponse) -> Object:
        """Return the object in a response; ApiError for an error status or invalid JSON."""
        status = response.status
        try:
            raw = response.read(_MOST + 1)
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(error) from None
        # A read with a maximum size doesn't report that the body was truncated.
        if response.length or len(raw) > _MOST:
            raise self._unreachable(ValueError("its response was truncated, or is too long"))
        found: Any = None
        try:
            found = json.loads(raw) if raw else {}
        except (ValueError, RecursionError):
            if 200 <= status < 300:
                raise self._unreachable(ValueError("its response isn't JSON")) from None
        if 200 <= status < 300 and isinstance(found, dict):
            return found
        raise self._refused(method, path, response, found)

    def keep(self) -> ssl.SSLSocket:
        """Return the connection, which the caller must close."""
        return self._sockets.pop()

    def close(self) -> None:
        """Close the connection."""
        for each in self._sockets:
            each.close()

    def _connect(self, context: ssl.SSLContext) -> ssl.SSLSocket:
        """Return a connection to the first of the server's addresses that accepts one.

        Each address gets an equal part of the remaining time, so that a silent one doesn't use it
        all.
        """
        failure: OSError = TimeoutError("timed out")
        host, port = self._access.host, self._access.port
        every = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        for number, (family, kind, protocol, _, address) in enumerate(every):
            plain = socket.socket(family, kind, protocol)
            now = self._clock()
            end = now + (self._end - now) / (len(every) - number)
            try:
                plain.settimeout(_left(end, self._clock))
                plain.connect(address)
                plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for option, value in _KEEP_ALIVE:
                    plain.setsockopt(socket.IPPROTO_TCP, option, value)
                plain.settimeout(_left(end, self._clock))
                return context.wrap_socket(plain, server_hostname=self._access.server_name)
            except OSError as error:
                plain.close()
                failure = error
        raise failure

    def _unreachable(self, error: Exception) -> ApiError:
        why = "it doesn't answer in time" if isinstance(error, TimeoutError) else str(error)
        verify = getattr(error, "verify_message", "")
        why = f"its certificate isn't valid ({verify})" if verify else why
        return ApiError(
            self._hidden(f"The API server at {self._access.server} can't be asked: {why}")
        )

    def _refused(
        self, method: str, path: str, response: http.client.HTTPResponse, found: Any
    ) -> ApiError:
        said = found if isinstance(found, dict) else {}
        why = said.get("message") or f"status {response.status} {response.reason}"
        cause = self._hidden(f"The API server refuses {method} of {path}: {why}")
        return ApiError(
            cause,
            response.status,
            str(said.get("reason", "")),
            _pause(response.getheader("Retry-After"), response.status),
        )

    def _hidden(self, text: str) -> str:
        """Return a truncated sentence without the token, which a server could send back."""
        if self._token:
            text = text.replace(self._token, "[token]")  # protects: no-token-said
        return printable(text)[:_LONGEST_REASON].rstrip(". ")


class _DeadlineConnection(io.RawIOBase):
    """A connection with one deadline for all its operations, with http.client's socket methods."""

    def __init__(self, inner: ssl.SSLSocket, end: float, clock: Clock, *, piecewise: bool) -> None:
        super().__init__()
        self._inner = inner
        self._end = end
        self._clock = clock
        self._piecewise = piecewise

    def makefile(self, mode: str) -> Any:  # noqa: ARG002 - http.client's "rb"
        """Return the reader; with ``piecewise`` it reads no more bytes than requested."""
        return self if self._piecewise else io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._inner.settimeout(_left(self._end, self._clock))  # protects: whole-deadline
        return self._inner.recv_into(buffer)

    def sendall(self, data: bytes) -> None:
        """Send all the data."""
        rest = memoryview(data)
        while rest:
            self._inner.settimeout(_left(self._end, self._clock))
            rest = rest[self._inner.send(rest) :]

    def close(self) -> None:
        """Leave the connection open: the exchange owns it."""


class WatchStream:
    """A non-blocking stream of events. ``fileno`` is readable when there may be some."""

    def __init__(self, connection: ssl.SSLSocket, *, chunked: bool) -> None:
        self._socket = connection
        self._socket.setblocking(False)
        self._chunks = _Chunks() if chunked else None
        self._rest = b""
        self.is_over = False

    def fileno(self) -> int:
        """Return the file descriptor."""
        return self._socket.fileno()

    def read(self) -> list[Object]:
        """Return the received events; ``is_over`` is set when no more will come.

        An incomplete line at the end of the connection is dropped: the caller resumes from the last
        complete version. ApiError for data that isn't a watch.
        """
        try:
            data = self._received()
        except (OSError, ValueError) as error:
            self.is_over, data = True, b""
            if isinstance(error, ValueError):
                raise ApiError(f"The API server's watch is invalid: {error}") from None
        self._rest += data
        *lines, self._rest = self._rest.split(b"\n")
        if len(self._rest) > _LONGEST_LINE:
            self.is_over = True
            raise ApiError(f"The API server sends an event of more than {_LONGEST_LINE} bytes")
        return [_event(line) for line in lines if line.strip()]

    def _received(self) -> bytes:
        found = b""
        while not self.is_over and len(found) < _LONGEST_LINE:
            try:
                data = self._socket.recv(_PIECE)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError, BlockingIOError):
                return found
            except OSError:
                data = b""
            self.is_over = not data
            if self._chunks is not None:
                found += self._chunks.feed(data)
                self.is_over = self.is_over or self._chunks.is_over
            else:
                found += data
        return found

    def wait(self, seconds: float) -> bool:
        """Tell whether data arrived within ``seconds``."""
        poll = select.poll()
        poll.register(self, select.POLLIN)
        return bool(poll.poll(seconds * 1000))

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


class _Chunks:
    """An incremental decoder of a chunked body (RFC 9112, 7.1)."""

    def __init__(self) -> None:
        self.is_over = False
        self._held = b""
        self._left = 0  # bytes of the current chunk and of the end of its line
        self._in_chunk = False

    def feed(self, data: bytes) -> bytes:
        """Return the decoded data; ValueError for invalid chunks."""
        self._held += data
        found = b""
        while self._held and not self.is_over:
            if self._in_chunk:
                took, self._held = self._held[: self._left], self._held[self._left :]
                body = max(0, self._left - 2)  # the end of the line comes after it
                found += took[:body]
                self._left -= len(took)
                self._in_chunk = self._left > 0
                continue
            line, newline, rest = self._held.partition(b"\n")
            if not newline:
                if len(line) > 1024:
                    raise ValueError("a chunk's size has no end")
                break
            self._held = rest
            size = _size(line)
            self.is_over = size == 0
            self._left, self._in_chunk = size + 2, size > 0
        return found


def _size(line: bytes) -> int:
    digits = line.partition(b";")[0].strip()
    if not re.fullmatch(rb"[0-9A-Fa-f]{1,8}", digits):
        raise ValueError("a chunk has no size")
    return int(digits, 16)


def _event(line: bytes) -> Object:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not isinstance(found.get("object"), dict):
        raise ApiError("The API server's watch is invalid: a line isn't an event")
    return found


def _left(end: float, clock: Clock) -> float:
    left = end - clock()
    if left <= 0:
        raise TimeoutError("timed out")
    return left


def _pause(header: str | None, status: int) -> float:
    """Return the pause that a server requests; a date, which none sends, counts as one second."""
    if header is None:
        return 1.0 if status == 429 else 0.0
    text = header.strip()
    return min(float(text), _LONGEST_PAUSE) if text.isdecimal() and len(text) < 10 else 1.0


def segment(name: str) -> str:
    """Return a Kubernetes name as a segment of a path; PluginError for an invalid one."""
    if not _NAME.fullmatch(name) or ".." in name:  # protects: names-in-paths
        raise PluginError(
            f"{name!a:.80} can't be the name of an object", "Use letters, digits, - and ."
        )
    return quote(name, safe="")

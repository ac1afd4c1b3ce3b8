"""Non-blocking connections to the exporter, none of which delays another."""

import contextlib
import functools
import ipaddress
import math
import select
import socket
import ssl
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

from gpuhook.metrics.web_config import WebConfig
from gpuhook.metrics.web_files import WebContent
from gpuhook.monitor import http_request

_PATIENCE = 5.0  # seconds for receiving a whole request, and for sending its response
_WAITING = 32  # connections that can't be answered at once
_MOST = 256  # connections, of which select() could watch 1,000
_PAUSE = 0.1  # seconds, after a connection couldn't be accepted


class HttpConnection:
    """A non-blocking connection for one request and its response.

    ``peer`` is the client's address.
    """

    def __init__(self, connection: socket.socket, peer: str) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._answer: memoryview | None = None  # the rest of it
        self._asks_to_send = False  # TLS has to send before it can receive
        self.begun = False  # TLS or plain has been decided
        self.is_over = False  # nothing more will be received or sent
        self.is_allowed = False  # the request is authorized
        self.waits_for_check = False  # of its password
        self.peer = peer
        self.end = math.inf
        self.request = b""

    def fileno(self) -> int:
        """Return its descriptor, for select."""
        return self._socket.fileno()

    def begin(self, web: WebConfig | None) -> None:
        """Start receiving, with TLS if that is configured."""
        self.begun = True
        self.end = time.monotonic() + _PATIENCE
        try:
            if web is not None:
                self._socket = web.wrap(self._socket)
        except OSError:  # the client has disconnected
            self.is_over = True
            return
        self.go_on()

    @property
    def is_whole(self) -> bool:
        """True once its request suffices for a response, until it is given one."""
        return self._answer is None and not self.is_over and http_request.is_whole(self.request)

    @functools.cached_property
    def password(self) -> str:
        """The Authorization header of its whole request."""
        return http_request.header(self.request, b"authorization")

    @property
    def is_answered(self) -> bool:
        """True once it is given a response, even if that isn't sent yet."""
        return self._answer is not None

    @property
    def takes(self) -> bool:
        """True while there is more to send."""
        return bool(self._answer) or self._asks_to_send

    def give(self, answer: bytes) -> None:
        """Start sending the response."""
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
                piece = self._socket.recv(http_request.MAX_BYTES)
                # Data after the response is read, too: otherwise, closing would reset the
                # connection, and the client could lose the response (RFC 9112, 9.6).
                self.request += piece if self._answer is None else b""
                self.is_over = not piece
        except ssl.SSLWantWriteError:
            self._asks_to_send = True
        except (BlockingIOError, ssl.SSLWantReadError):
            pass
        except OSError:
            self.is_over = True

    def _say_end(self) -> None:
        """Shut down the sending direction."""
        if isinstance(self._socket, ssl.SSLSocket):
            with contextlib.suppress(ssl.SSLWantReadError):  # the peer's own end isn't waited for
                self._socket.unwrap()
        else:
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the connection."""
        self.is_over = True
        self._socket.close()


class Clients:
    """The connected clients.

    ``web`` has TLS and passwords. With ``follows``, no client is served without it.
    """

    def __init__(self, listener: socket.socket, *, follows: bool) -> None:
        self.follows = follows
        self.web: WebConfig | None = None
        self._content: WebContent | None = None
        self._listener = listener
        self._open: list[HttpConnection] = []
        self._asked: list[HttpConnection] = []  # clients for which the files are being checked

    def wait(self, descriptors: Iterable[int]) -> list[Any]:
        """Continue all connections that are ready, and return the readable descriptors."""
        ends = [each.end for each in self._open if not each.is_whole]
        end = min(ends, default=math.inf)
        patience = None if end == math.inf else max(0.0, end - time.monotonic())
        takers = [each for each in self._open if each.takes]
        # Data after a request is read after the response.
        others = [each for each in self._open if each.begun and not each.takes | each.is_whole]
        readers: list[Any] = [self._listener, *descriptors, *others]
        came = select.select(readers, takers, [], patience)
        for each in (*came[0], *came[1]):
            if isinstance(each, HttpConnection):
                each.go_on()
        if self._listener in came[0]:
            self._accept()
        now = time.monotonic()
        # protects: slow-connection
        self._drop(each for each in self._open if now >= each.end and not each.is_whole)
        return came[0]

    def whole(self) -> list[HttpConnection]:
        """Return the clients with a whole request and no response."""
        return [each for each in self._open if each.is_whole]

    def wants_files(self) -> bool:
        """Tell whether a client waits for a check that the files are current."""
        self._asked = [each for each in self._open if not each.begun]
        return bool(self._asked)

    def begin(self) -> None:
        """Continue with the clients that connected before the files were checked."""
        for each in self._asked:
            if self.web is None:  # protects: web-config-needed
                each.is_over = True
            elif not each.is_over:
                each.begin(self.web)
        self._asked = []
        self._drop(())

    def follow(self, content: WebContent) -> None:
        """Use other TLS and passwords; clients connected before have to connect again."""
        if content == self._content:
            return
        self.web = WebConfig(content)  # which raises MetricsError
        self._content = content
        # protects: followed-at-once
        self._drop([each for each in self._open if each.begun and not each.is_answered])

    def _accept(self) -> None:
        """Accept waiting connections, and receive what they have already sent."""
        for _ in range(_WAITING):
            try:
                connection, address = self._listener.accept()
            except (BlockingIOError, ConnectionError):
                break
            except OSError:  # no descriptor or no memory for it
                gone = self._slow() or _of_the_busiest(self._open)
                self._drop(gone)
                if not gone:
                    time.sleep(_PAUSE)
                break
            client = HttpConnection(connection, peer_of(str(address[0])))
            self._open.append(client)
            if not self.follows:
                client.begin(None)
            if len(self._open) > _WAITING:
                self._drop(self._slow())
            if len(self._open) > _MOST:  # protects: most-connections
                self._drop(_of_the_busiest(self._open))

    def _slow(self) -> list[HttpConnection]:
        """Return the oldest connection of the peer with the most that can't be answered at once."""
        slow = [each for each in self._open if not each.is_whole or each.waits_for_check]
        return _of_the_busiest(slow)  # protects: many-connections

    def _drop(self, some: Iterable[HttpConnection]) -> None:
        """Close some connections, and those that are over."""
        gone = {*some, *(each for each in self._open if each.is_over)}
        for each in gone:
            each.close()
        self._open = [each for each in self._open if each not in gone]

    def close(self) -> None:
        """Close all connections."""
        self._drop([*self._open])


def _of_the_busiest(some: list[HttpConnection]) -> list[HttpConnection]:
    """Return the oldest of these connections of the peer with most of them."""
    counts = Counter(each.peer for each in some)
    return [max(some, key=lambda each: counts[each.peer])] if some else []


def peer_of(host: str) -> str:
    """Return the peer of an address: for IPv6, all addresses of a /64 network are one peer."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return host
    mapped = address.ipv4_mapped
    return str(mapped) if mapped else str(int(address) >> 64)  # protects: peers-network

"""The transport between an engine and its plugin: a multiplexer with two ttrpc connections.

Source: containerd/nri (pkg/net/multiplex) and containerd/ttrpc (PROTOCOL.md). A frame has a header
of 8 bytes: connection and length (big endian). A ttrpc message has one of 10: length, stream, type,
flags. The engine runs as root, but its messages may contain tenants' texts: all lengths are
limited, and an invalid message ends the connection.
"""

import os
import select
import socket
import struct
import time
from dataclasses import dataclass

from gpuhook.base.errors import PluginError

SOCKET = "/var/run/nri/nri.sock"  # the engines' default
PROCESS = "gpuhook-nri"  # the name of the process that serves an engine
PLUGIN, RUNTIME = 1, 2  # connections for the engine's requests, and for ours
REQUEST, RESPONSE = 1, 2  # types of messages
_FRAME = struct.Struct(">II")
_MESSAGE = struct.Struct(">IIBB")
MOST = 4 << 20  # bytes of a message that isn't refused
_LONGEST = 1 << 24  # bytes of a frame or message: older engines send so many, with no stated limit
_READ = 4096  # bytes that Go's bufio.Reader requests
_CHUNK = 1 << 16
_PATIENCE = 2.0  # seconds for the engine to receive a message: as long as engines wait for ours


@dataclass(frozen=True)
class Message:
    """A ttrpc message on a connection."""

    connection: int
    stream: int
    kind: int
    data: bytes


class Connection:
    """A connection to an engine; PluginError whenever it breaks.

    ``stopping`` is a descriptor that becomes readable when the plugin has to stop.
    """

    def __init__(self, channel: socket.socket, stopping: int) -> None:
        self._socket = channel
        self._socket.setblocking(False)
        self._stopping = stopping
        self._raw = bytearray()
        self._parts = {PLUGIN: bytearray(), RUNTIME: bytearray()}

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def send(self, connection: int, stream: int, kind: int, data: bytes) -> None:
        """Send a message in frames that fit into the engine's read buffer of 4096 bytes.

        The engine disconnects after a longer frame, because it expects a frame in one read.
        """
        body = _MESSAGE.pack(len(data), stream, kind, 0) + data
        parts = (body[at : at + _READ] for at in range(0, len(body), _READ))
        left = memoryview(b"".join(_FRAME.pack(connection, len(part)) + part for part in parts))
        deadline = time.monotonic() + _PATIENCE
        while left:
            wait = deadline - time.monotonic()
            if wait <= 0 or not select.select([], [self._socket], [], wait)[1]:
                raise _broken("takes nothing")
            try:
                left = left[self._socket.send(left) :]
            except BlockingIOError:
                continue
            except OSError as error:
                raise _broken(error.strerror or "hung up") from None

    def receive(self, seconds: float | None = None) -> Message | None:
        """Return the next message; None when the plugin has to stop.

        PluginError if none is received for ``seconds``.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        while True:
            message = self._message()
            if message is not None:
                return message
            wait = None if deadline is None else max(deadline - time.monotonic(), 0)
            ready = select.select([self._socket.fileno(), self._stopping], [], [], wait)[0]
            if self._stopping in ready:
                return None
            if not ready:
                raise _broken(f"said nothing for {seconds:g} seconds")
            try:
                chunk = self._socket.recv(_CHUNK)
            except BlockingIOError:
                continue
            except OSError as error:
                raise _broken(error.strerror or "hung up") from None
            if not chunk:
                raise _broken("hung up")
            self._raw += chunk
            self._take_frames()

    def _take_frames(self) -> None:
        """Move whole frames' bytes to their connections; those of other connections are dropped."""
        while len(self._raw) >= _FRAME.size:
            connection, size = _FRAME.unpack_from(self._raw)
            if size > _LONGEST:  # protects: nri-frame-limit
                raise _broken("sent a frame that is too long")
            end = _FRAME.size + size
            if len(self._raw) < end:
                return
            if connection in self._parts:
                self._parts[connection] += self._raw[_FRAME.size : end]
            del self._raw[:end]

    def _message(self) -> Message | None:
        for connection, data in self._parts.items():
            if len(data) < _MESSAGE.size:
                continue
            size, stream, kind, _ = _MESSAGE.unpack_from(data)
            if size > _LONGEST:
                raise _broken("sent a message that is too long")
            end = _MESSAGE.size + size
            if len(data) >= end:
                found = bytes(data[_MESSAGE.size : end])
                del data[:end]
                return Message(connection, stream, kind, found)
        return None


def dial(path: str, environ: "os._Environ[str] | dict[str, str]", stopping: int) -> Connection:
    """Return a connection to the engine at ``path``, or the one from the engine that started us."""
    given = environ.get("NRI_PLUGIN_SOCKET", "")
    channel = None
    try:
        if given.isascii() and given.isdecimal():
            channel = socket.socket(fileno=int(given))
        else:
            channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            channel.settimeout(_PATIENCE)
            channel.connect(path)
    except OSError as error:
        if channel is not None:
            channel.close()
        raise PluginError(
            f"The engine at {path} can't be reached: {error.strerror or error}",
            "Start it with NRI on: containerd 1.7 has it off, see docs/kubernetes/nri.md",
        ) from None
    return Connection(channel, stopping)


def _broken(why: str) -> PluginError:
    return PluginError(f"The connection to the engine broke: it {why}", "Look at the engine's log")

"""The connection to an engine: frames and messages, whole, in pieces, too long, or any bytes."""

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as some

from gpuhook.base.errors import PluginError
from gpuhook.cluster.nri.transport import PLUGIN, REQUEST, RESPONSE, Connection, Message


def frame(connection: int, body: bytes) -> bytes:
    return struct.pack(">II", connection, len(body)) + body


def message(stream: int, kind: int, data: bytes) -> bytes:
    return struct.pack(">IIBB", len(data), stream, kind, 0) + data


@pytest.fixture
def ends() -> Iterator[tuple[Connection, socket.socket]]:
    """Our end of a connection, and the engine's end."""
    ours, theirs = socket.socketpair()
    reader, writer = os.pipe()
    try:
        yield Connection(ours, reader), theirs
    finally:
        for each in (ours, theirs):
            each.close()
        os.close(reader)
        os.close(writer)


Ends = tuple[Connection, socket.socket]


def test_a_message_is_one_frame(ends: Ends) -> None:
    ours, theirs = ends
    ours.send(PLUGIN, 7, RESPONSE, b"said")
    assert theirs.recv(100) == frame(1, message(7, 2, b"said"))


def test_a_long_message_is_split_into_frames(ends: Ends) -> None:
    """containerd reads 4096 bytes at once, and closes the connection at a larger frame."""
    ours, theirs = ends
    data = bytes(range(256)) * 40
    ours.send(PLUGIN, 7, RESPONSE, data)
    wire, got = theirs.recv(1 << 16), b""
    while wire:
        connection, size = struct.unpack(">II", wire[:8])
        assert connection == PLUGIN
        assert 0 < size <= 4096
        got, wire = got + wire[8 : 8 + size], wire[8 + size :]
    assert got == message(7, RESPONSE, data)


def test_messages_are_assembled_from_any_pieces(ends: Ends) -> None:
    """Frames arrive in any pieces; a message may take several frames or share one."""
    ours, theirs = ends
    whole = message(1, REQUEST, b"one") + message(3, REQUEST, b"two")
    wire = frame(1, whole[:5]) + frame(9, b"nobody's") + frame(1, whole[5:])
    for byte in wire[:-1]:
        theirs.send(bytes([byte]))
    theirs.send(wire[-1:])
    assert ours.receive(5) == Message(1, 1, REQUEST, b"one")
    assert ours.receive(5) == Message(1, 3, REQUEST, b"two")


@pytest.mark.protects(
    "nri-frame-limit", "an overlong frame from the engine ends the NRI connection"
)
@pytest.mark.parametrize(
    "wire",
    [
        struct.pack(">II", 1, (1 << 24) + 1),
        frame(1, struct.pack(">IIBB", (1 << 24) + 1, 1, 1, 0)),
    ],
    ids=["frame", "message"],
)
def test_an_oversized_frame_or_message_is_refused_at_once(wire: bytes, ends: Ends) -> None:
    ours, theirs = ends
    theirs.send(wire)
    with pytest.raises(PluginError, match="too long"):
        ours.receive(5)


def test_a_closed_connection_is_an_error(ends: Ends) -> None:
    ours, theirs = ends
    theirs.close()
    with pytest.raises(PluginError, match="hung up"):
        ours.receive(5)
    with pytest.raises(PluginError):
        ours.send(1, 1, 1, b"x" * (1 << 20))


def test_a_silent_engine_causes_an_error_after_the_timeout(ends: Ends) -> None:
    with pytest.raises(PluginError, match="said nothing"):
        ends[0].receive(0.05)


def test_an_engine_that_reads_nothing_causes_an_error(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpuhook.cluster.nri.transport._PATIENCE", 0.05)
    with pytest.raises(PluginError, match="takes nothing"):
        ends[0].send(1, 1, 1, b"x" * (2 << 20))


def test_receiving_ends_when_stopped() -> None:
    ours, theirs = socket.socketpair()
    reader, writer = os.pipe()
    os.write(writer, b"x")
    with ours, theirs:
        assert Connection(ours, reader).receive(5) is None
    os.close(reader)
    os.close(writer)


@given(some.binary(max_size=400))
def test_any_bytes_are_messages_or_an_error(data: bytes) -> None:
    """Bytes that aren't messages raise only a PluginError."""
    ours, theirs = socket.socketpair()
    reader, writer = os.pipe()
    with ours, theirs:
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        connection = Connection(ours, reader)
        with suppress(PluginError):
            while connection.receive(1):
                pass
    os.close(reader)
    os.close(writer)

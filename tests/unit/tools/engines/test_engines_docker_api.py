"""Limits of time and size for an answer from Docker's socket."""

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from timeouts import in_time

from gpuhook.tools.engines import docker_api

Serve = Callable[[socket.socket], None]
OK = b"HTTP/1.0 200 OK\r\n\r\n"


@pytest.fixture
def listen(tmp_path: Path) -> Iterator[Callable[[Serve], str]]:
    """A function that starts a listener on a socket; its argument serves each connection."""
    listeners: list[socket.socket] = []

    def start(serve: Serve) -> str:
        listener = socket.socket(socket.AF_UNIX)
        path = str(tmp_path / f"{len(listeners)}.sock")
        listener.bind(path)
        listener.listen()
        listeners.append(listener)
        threading.Thread(target=_accept, args=(listener, serve), daemon=True).start()
        return path

    yield start
    for listener in listeners:
        listener.close()


def _accept(listener: socket.socket, serve: Serve) -> None:
    try:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1 << 16)
            serve(connection)
    except OSError:
        return  # the test is over


def _says(answer: bytes) -> Serve:
    return lambda connection: connection.sendall(answer)


def _endless(beginning: bytes, piece: bytes) -> Serve:
    def serve(connection: socket.socket) -> None:
        connection.sendall(beginning)
        while True:
            connection.sendall(piece)

    return serve


def _waits_for_the_end(connection: socket.socket) -> None:
    connection.recv(1)


def _in_drops(connection: socket.socket) -> None:
    connection.sendall(OK)
    connection.settimeout(0.05)
    answer = None
    while answer is None:  # until the client closes the connection
        connection.sendall(b" ")
        with contextlib.suppress(TimeoutError):
            answer = connection.recv(1)


def test_a_large_valid_answer_is_read(listen: Callable[[Serve], str]) -> None:
    body = json.dumps({"DefaultRuntime": "runc", "filler": "x" * 300_000}).encode()
    answer = docker_api.ask(listen(_says(OK + body)))
    assert answer["DefaultRuntime"] == "runc"


@pytest.mark.protects(
    "docker-bound",
    "other users: an answer from Docker is read only up to a size limit",
    only="endless",
)
@pytest.mark.parametrize(
    ("serve", "words"),
    [
        (_endless(OK, b" " * 65536), "more than 4 MiB"),
        (_endless(b"HTTP/1.0 200 OK\r\n", b"X: " + b"y" * 60000 + b"\r\n"), "more than 4 MiB"),
        (_says(OK + b"[" * 100_000), "its answer isn't an object"),
        (_says(OK + b"[]"), "its answer isn't an object"),
        (_says(b"HTTP/1.0 403 Forbidden\r\n\r\n{}"), "403 Forbidden"),
        (_says(b"220 mail ESMTP\r\n"), "speak HTTP"),
        (_says(b""), "speak HTTP"),
    ],
    ids=["endless body", "endless head", "deep", "a list", "refused", "no HTTP", "nothing"],
)
def test_invalid_or_oversized_answers_are_refused(
    listen: Callable[[Serve], str], serve: Serve, words: str
) -> None:
    path = listen(serve)
    with in_time(), pytest.raises(OSError, match=words):
        docker_api.ask(path)


@pytest.mark.protects(
    "docker-patience",
    "other users: a request to Docker fails after a timeout",
    instead="while patience := _PATIENCE or end:",
)
@pytest.mark.parametrize("serve", [_waits_for_the_end, _in_drops], ids=["silence", "drops"])
def test_an_answer_that_never_completes_times_out(
    listen: Callable[[Serve], str], serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(docker_api, "_PATIENCE", 0.5)
    path = listen(serve)
    with in_time(), pytest.raises(TimeoutError):
        docker_api.ask(path)


def test_a_docker_socket_with_a_full_backlog_causes_a_timely_error(tmp_path: Path) -> None:
    """The listener's queue of waiting connections is full."""
    path = str(tmp_path / "busy.sock")
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as first:
        listener.bind(path)
        listener.listen(0)
        first.connect(path)
        with in_time(), pytest.raises(OSError):
            docker_api.ask(path)

"""Who connects and does nothing keeps nobody from the metrics."""

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from limits import in_time

from gpuhook.config import load
from gpuhook.metrics import exporter, serve
from gpuhook.metrics.observer import Observer

PATIENCE = 60.0
SLOW = 40  # more connections than are kept
BUSY = 30.0  # seconds for one look on a busy machine; two for each of the slow would be 80


@pytest.fixture
def address(tmp_path: Path) -> Iterator[tuple[str, int]]:
    """Serve, and give where."""
    config = tmp_path / "config.toml"
    config.write_text(f'[gpuhook]\nstate-dir = "{tmp_path}/state"\n')
    with serve.listen("127.0.0.1:0") as listener:
        pid = os.fork()
        if pid == 0:
            try:
                observer = Observer(load(str(config)), pod_resources=f"{tmp_path}/none")
                serve.Service(observer, exporter.Options(), lambda _: None).run(listener)
            finally:
                os._exit(0)
        try:
            yield listener.getsockname()
        finally:
            os.kill(pid, signal.SIGTERM)
            with in_time():
                os.waitpid(pid, 0)


def connected(address: tuple[str, int], words: str = "") -> socket.socket:
    made = socket.create_connection(address, PATIENCE)
    made.sendall(words.encode())
    return made


def asked(address: tuple[str, int], words: str) -> str:
    """Return the whole answer."""
    with connected(address, words) as made, made.makefile("rb") as file:
        return file.read().decode()


def test_requests_are_answered(address: tuple[str, int]) -> None:
    answer = asked(address, "GET /metrics HTTP/1.1\r\n\r\n")
    head, _, body = answer.partition("\r\n\r\n")
    assert head.startswith("HTTP/1.0 200 OK\r\nContent-Type: text/plain")
    assert f"Content-Length: {len(body)}" in head
    assert "gpuhook_metrics_complete" in body
    assert asked(address, "HEAD /metrics HTTP/1.1\r\n\r\n").endswith("\r\n\r\n")
    assert asked(address, "GET / HTTP/1.1\r\n\r\n").startswith("HTTP/1.0 404 ")
    assert asked(address, "POST /metrics HTTP/1.1\r\n\r\n").startswith("HTTP/1.0 405 ")
    accept = "Accept: application/openmetrics-text; version=1.0.0"
    assert asked(address, f"GET /metrics HTTP/1.1\r\n{accept}\r\n\r\n").endswith("# EOF\n")


@pytest.mark.parametrize("said", ["", "GET /metr", "GET /metrics HTTP/1.1\r\nA: b\r\n"])
def test_who_does_not_finish_makes_nobody_wait(address: tuple[str, int], said: str) -> None:
    asked(address, "GET /metrics HTTP/1.1\r\n\r\n")
    with ExitStack() as slow:
        for _ in range(SLOW):
            slow.enter_context(connected(address, said))
        before = time.monotonic()
        assert " 200 " in asked(address, "GET /metrics HTTP/1.1\r\n\r\n")
        assert time.monotonic() - before < BUSY


def test_a_request_may_come_in_pieces(address: tuple[str, int]) -> None:
    with connected(address, "GET /metrics HTT") as made, made.makefile("rb") as file:
        assert " 200 " in asked(address, "GET /metrics HTTP/1.1\r\n\r\n")
        made.sendall(b"P/1.1\r\n\r\n")
        assert file.read().startswith(b"HTTP/1.0 200 OK")


def test_who_says_too_much_is_cut_off(address: tuple[str, int]) -> None:
    with connected(address) as made:
        made.settimeout(PATIENCE)
        with contextlib.suppress(ConnectionError):
            made.sendall(b"x" * (1 << 15))
            assert made.recv(1) == b""

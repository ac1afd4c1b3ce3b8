"""The metrics server, which serves other clients whatever a client sends or doesn't send."""

import contextlib
import re
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import serving
from timeouts import in_time
from yardstick import of_this_process, yardstick

from gpuhook.metrics import connections, exporter
from gpuhook.metrics.connections import Clients
from gpuhook.monitor import http_request
from gpuhook.monitor.service_metrics import listen

PATIENCE = 300.0
SLOW = 40  # more connections than are kept
SPACE = 0.5  # of the yardstick's time; quadratic code took ten times the yardstick and more
BUSY = 30.0  # seconds for an answer on a busy host; 2 for each slow connection would be 80


@pytest.fixture
def address(tmp_path: Path) -> Iterator[tuple[str, int]]:
    with serving(tmp_path) as found:
        yield found


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    with serving(tmp_path_factory.mktemp("serving")) as found:
        yield found


def connected(address: tuple[str, int], words: str = "") -> socket.socket:
    made = socket.create_connection(address, PATIENCE)
    made.sendall(words.encode("latin-1"))
    return made


def asked(address: tuple[str, int], words: str) -> str:
    """Return the whole answer to these words, after which the client sends nothing."""
    with connected(address, words) as made, made.makefile("rb") as file:
        made.shutdown(socket.SHUT_WR)
        return file.read().decode()


def status(address: tuple[str, int], words: str) -> int:
    """Return the status of a whole answer, or 0 for none."""
    answer = asked(address, words)
    if not answer:
        return 0
    head, _, body = answer.partition("\r\n\r\n")
    found = re.fullmatch(
        r"HTTP/1\.0 (\d{3}) [^\r\n]+\r\nContent-Type: [^\r\n]+\r\nContent-Length: (\d+)\r\n"
        r"Connection: close",
        head,
    )
    assert found
    assert len(body.encode()) == int(found[2]) or words.startswith("HEAD ")
    return int(found[1])


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
def test_unfinished_requests_do_not_delay_other_clients(
    address: tuple[str, int], said: str
) -> None:
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


def test_an_oversized_request_gets_status_431(address: tuple[str, int]) -> None:
    for words in (
        "x",
        "GET /metrics HTTP/1.1\r\nA: ",
        "GET /metrics HTTP/1.1\r\n" + "A: b\r\n" * 9,
    ):
        assert status(address, words + "x" * (1 << 16)) == 431


def test_a_client_that_keeps_sending_still_gets_its_answer(address: tuple[str, int]) -> None:
    with connected(address, "POST /metrics HTTP/1.1\r\n\r\n") as made, made.makefile("rb") as file:
        made.sendall(b"x" * (1 << 20))
        assert file.read().startswith(b"HTTP/1.0 405 ")


ODD = {
    "GET /metrics HTTP/1.0\n\n": 200,
    "GET /metrics HTTP/1.0\nAccept: text/plain\r\n\n": 200,
    "GET /metrics?a=%zz&\x7e HTTP/1.1\r\n\r\n": 200,
    "GET http://127.0.0.1:9836/metrics HTTP/1.1\r\n\r\n": 200,
    "GET HTTP://[::1]/metrics?x HTTP/1.1\r\n\r\n": 200,
    "HEAD /metrics HTTP/1.1\r\n\r\n": 200,
    "GET http:///metrics HTTP/1.1\r\n\r\n": 200,
    "GET hTTp://a\x7e!:@/metrics?http://b/ HTTP/1.1\r\n\r\n": 200,
    "GET /metrics http/1.9\n\r\n": 200,
    "GET http://http://127.0.0.1/metrics HTTP/1.1\r\n\r\n": 404,
    "GET http://127.0.0.1?/metrics HTTP/1.1\r\n\r\n": 200,
    "GET http:/metrics HTTP/1.1\r\n\r\n": 404,
    "GET https://127.0.0.1/metrics HTTP/1.1\r\n\r\n": 404,
    "GET  HTTP/1.1\r\n\r\n": 404,
    "GET ftp://127.0.0.1/metrics HTTP/1.1\r\n\r\n": 404,
    "GET http://127.0.0.1 HTTP/1.1\r\n\r\n": 404,
    "GET //metrics HTTP/1.1\r\n\r\n": 404,
    "GET /metrics%zz HTTP/1.1\r\n\r\n": 404,
    "GET /metrics%00 HTTP/1.1\r\n\r\n": 404,
    "GET /../metrics HTTP/1.1\r\n\r\n": 404,
    "GET * HTTP/1.1\r\n\r\n": 404,
    "OPTIONS * HTTP/1.1\r\n\r\n": 405,
    "CONNECT 127.0.0.1:80 HTTP/1.1\r\n\r\n": 405,
    "get /metrics HTTP/1.1\r\n\r\n": 405,
    "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n": 400,  # the beginning of HTTP/2
    "GET /metrics\r\n": 400,  # HTTP/0.9
    "GET /metrics\r\n\r\n": 400,
    "GET /metrics HTTP/1.1 \r\n\r\n": 400,
    "GET  /metrics HTTP/1.1\r\n\r\n": 400,
    "GET\t/metrics\tHTTP/1.1\r\n\r\n": 400,
    "GET\xa0/metrics\xa0HTTP/1.1\r\n\r\n": 400,
    "GET\v/metrics\fHTTP/1.1\r\n\r\n": 400,
    "GET /metrics\x85 HTTP/1.1\r\n\r\n": 400,
    "GET /metrics HTTP/11.1\r\n\r\n": 400,
    "GET /metrics HTTP/1.\xb2\r\n\r\n": 400,
    "GET /metrics HTTP/1.\r\n\r\n": 400,
    "GET /metrics HTTP/1.1\r\r\n\r\n": 400,
    "GET /metrics HTTP/1.1\r\x85\n\r\n": 400,
    "GET http://a\x7f/metrics HTTP/1.1\r\n\r\n": 400,
    "GET http://a /metrics HTTP/1.1\r\n\r\n": 400,
    "GET\xff /metrics HTTP/1.1\r\n\r\n": 400,
    " /metrics HTTP/1.1\r\n\r\n": 400,
    "  HTTP/1.1\r\n\r\n": 400,
    " GET /metrics HTTP/1.1\r\n\r\n": 400,
    "\r\n\r\n": 400,
    "\n": 400,
    "\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03\n\r\n": 400,  # a possible beginning of TLS
    "": 0,
    "\r": 0,
    "GET /metrics HTTP/1.1\r\nA: b": 0,
}
HEADERS = (
    "Accept", "Accept:", "Accept: ;q", "Accept: text/plain;version=q", "Accept : */*", ": b", ":",
    "Accept: text/plain;version=1.0.0\r\n ;version=q", "Accept: a\r\nAccept: b;q=\xb2",
    "\xff\0: \0", "Accept: application/openmetrics-text;version=q",
    "Accept: application/openmetrics-text;version=1", "Accept: " + "," * 9999,
    "Accept: " + "text/plain;q=" * 999, "A" * 9999 + ": b", "\rA: b\r",
    "Accept-Encoding: identity;q=0", "Accept-Encoding: gzip;q=x, *;q=-1", "Accept-Encoding: \xff",
    "Content-Length: -1", "Content-Length: 9\r\nContent-Length: 8", f"Content-Length: {'9' * 5000}",
    "Content-Length: \xb2", "Transfer-Encoding: chunked\r\nContent-Length: 1",
    "Expect: 100-continue", "Transfer-Encoding: x, chunked", "Upgrade: h2c\r\nConnection: Upgrade",
    "Host: \0", "Range: bytes=-",
)  # fmt: skip


@pytest.mark.parametrize(("words", "expected"), ODD.items())
def test_odd_requests_get_the_expected_status(
    lasting: tuple[str, int], words: str, expected: int
) -> None:
    assert status(lasting, words) == expected


@pytest.mark.parametrize("header", HEADERS)
def test_odd_headers_and_bodies_are_accepted(lasting: tuple[str, int], header: str) -> None:
    for body in ("", "0\r\n\r\n", "5\r\nhello\r\nx\r\n", "GET / HTTP/1.1\r\n\r\n", "\xff" * 99):
        request = f"GET /metrics HTTP/1.1\r\n{header}\r\n\r\n{body}"
        assert status(lasting, request) == 200


_any = st.binary(max_size=300).map(lambda data: data.decode("latin-1"))
_line = _any.map(lambda text: text.replace("\r", "").replace("\n", ""))
_wild = st.lists(
    st.sampled_from([
        "GET", "HEAD", " ", "  ", "\t", "/metrics", "http://", "?", "%", "%2", "HTTP/1.1", "HTTP/",
        "\r\n", "\r", "\n", "Accept", ":", "text/plain", "application/openmetrics-text", ";", ",",
        "version=", "q=", "1.0.0", '"', "\0", "\xff", "Content-Length: ", "-1", "chunked",
    ]) | _any,
    max_size=30,
).map("".join)  # fmt: skip


@settings(max_examples=150)
@given(_any | _wild | st.builds("{}\r\n\r\n".format, _line))
def test_any_request_line_gets_an_expected_status(lasting: tuple[str, int], words: str) -> None:
    found = status(lasting, words)
    assert found in (200, 400, 404, 405, 431) or (found == 0 and "\n" not in words)
    assert found != 0 or "\n\n" not in words


@settings(max_examples=100)
@given(_line | _wild.map(lambda text: text.replace("\n", "")), _line)
def test_any_header_in_a_request_is_accepted(
    lasting: tuple[str, int], accept: str, header: str
) -> None:
    request = f"GET /metrics HTTP/1.1\r\nAccept: {accept}\r\n{header}\r\n\r\n"
    assert status(lasting, request) == 200


@pytest.mark.protects(
    "failing-request",
    "a failing request doesn't stop the metrics service",
    instead="except MetricsError as error:",
)
def test_a_failing_request_is_answered_and_its_error_logged_once(
    address: tuple[str, int], tmp_path: Path
) -> None:
    request = "GET /metrics HTTP/1.1\r\n\r\n"
    (tmp_path / "breaks").touch()
    assert "could not be read" in asked(address, request)
    with in_time():  # preparing the next answer fails after this answer is sent
        while "RecursionError" not in (tmp_path / "told").read_text():
            time.sleep(0.01)
    (tmp_path / "breaks").unlink()
    assert status(address, request) == 200
    told = (tmp_path / "told").read_text()
    assert told.count("ValueError: a") == 1
    assert "\x1b" not in told


@pytest.mark.protects(
    "failing-text",
    "metrics: a failure to write the metrics text doesn't stop the service",
    instead="except MetricsError as error:",
)
def test_a_failure_to_write_the_metrics_text_is_answered_and_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> bytes:
        raise ValueError("a \x1b[31mlabel\n that nobody thought of")

    monkeypatch.setattr(exporter, "text", fails)
    with serving(tmp_path) as address:
        for _ in range(2):
            assert status(address, "GET /metrics HTTP/1.1\r\n\r\n") == 500
        assert status(address, "GET / HTTP/1.1\r\n\r\n") == 404
    told = (tmp_path / "told").read_text()
    assert "couldn't be written: 'ValueError: a" in told
    assert "\x1b" not in told


@pytest.mark.protects(
    "web-config-needed",
    "metrics: no client is answered without the web configuration file",
    instead="if False:",
)
def test_no_client_is_answered_without_the_web_config() -> None:
    """The files for TLS and passwords could not be read."""
    with (
        listen("127.0.0.1:0") as listener,
        contextlib.closing(connections.Clients(listener, follows=True)) as clients,
        connected(listener.getsockname(), "GET /metrics HTTP/1.1\r\n\r\n") as made,
    ):
        while not clients.wants_files():
            clients.wait(())
        clients.begin()
        assert clients.whole() == []
        with contextlib.suppress(ConnectionError):
            assert made.recv(1) == b""


@pytest.mark.protects(
    "peers-network",
    "metrics: IPv6 addresses of one /64 network count as one client",
    instead="return host",
)
@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("192.0.2.1", "192.0.2.2", False),
        ("192.0.2.1", "::ffff:192.0.2.1", True),
        ("2001:db8::1", "2001:db8::ffff:2", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("fe80::1%lo", "fe80::2%eth0", True),
    ],
)
def test_addresses_of_one_network_count_as_one_peer(one: str, other: str, same: bool) -> None:
    assert (connections.peer_of(one) == connections.peer_of(other)) == same


# Time ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "piece", [b"a", b" ", b"/", b"http://", b"http://a ", b"\r", b"\n", b"a:\n", b"\xff", b"?"]
)
@pytest.mark.parametrize("before", [b"", b"GET ", b"GET http://", b"GET / HTTP/1.1\r\n"])
@pytest.mark.parametrize("after", [b"\r\n\r\n", b" HTTP/1.0\n\n"])
def test_request_parsing_time_is_linear_in_the_length(
    before: bytes, piece: bytes, after: bytes
) -> None:
    """A request four times as long takes about four times as long, not sixteen times."""
    short, long = (
        min(of_this_process(partial(_answered, before + piece * n + after)) for _ in range(3))
        for n in (4000 // len(piece), 16000 // len(piece))
    )
    assert long < 8 * short + SPACE * yardstick()


def _answered(request: bytes) -> None:
    for _ in range(3):
        http_request.is_whole(request)
        answer = http_request.refusal(request) or http_request.elsewhere(request)
        assert answer or http_request.header(request, b"accept") is not None


def test_an_overlong_request_is_refused_without_parsing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(http_request, "first")
    request = b"GET http://" + b"a" * (1 << 20) + b"\r\n\r\n"
    assert http_request.is_whole(request)
    answer = http_request.refusal(request)
    assert answer
    assert answer[0].startswith("431 ")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> float:
    """The server's patience in seconds; it is long enough for a busy host."""
    monkeypatch.setattr(connections, "_PATIENCE", 2.0)
    return 2.0


@pytest.mark.protects(
    "slow-connection", "a slow connection to the metrics server is closed at its timeout"
)
def test_slow_requests_are_closed_at_the_time_limit(impatient: float, tmp_path: Path) -> None:
    """This includes clients that send one letter now and then."""
    first = "GET /metrics HTTP/1.1\r\n"
    before = time.monotonic()
    with serving(tmp_path) as address, in_time(), ExitStack() as slow:
        rest = [
            slow.enter_context(connected(address, said))
            for said in ("", "", "G", first, first, f"{first}A: b")
        ]
        for each in rest:
            each.settimeout(0.1)
        while rest:
            rest = [each for number, each in enumerate(rest) if not _has_end(each, b"x" * number)]
    assert time.monotonic() - before >= 0.8 * impatient


def _has_end(connection: socket.socket, said: bytes) -> bool:
    """Send another byte, wait a little, and tell whether the server has closed the connection."""
    try:
        connection.sendall(said[:1])
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def test_clients_that_read_no_answer_are_closed_at_the_time_limit(
    impatient: float, tmp_path: Path
) -> None:
    """The answer is larger than the buffers, and the client reads few bytes of it, or none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exporter, "text", lambda *_, **__: b"x" * (32 << 20))
        with serving(tmp_path) as address, ExitStack() as slow:
            waiting = [slow.enter_context(connected(address, "GET /metrics HTTP/1.1\r\n\r\n"))
                       for _ in range(4)]  # fmt: skip
            before = time.monotonic()
            assert status(address, "GET / HTTP/1.1\r\n\r\n") == 404
            assert time.monotonic() - before < BUSY
            with in_time(60):
                assert all(each.recv(1, socket.MSG_PEEK) for each in waiting)
                time.sleep(impatient)  # the tested time, after which the server disconnects
                assert all(_was_cut(each) for each in waiting)


def _was_cut(connection: socket.socket) -> bool:
    """Tell whether the connection closes before all bytes have come."""
    size = 0
    with contextlib.suppress(ConnectionError):
        while piece := connection.recv(1 << 20):
            size += len(piece)
    return size < 32 << 20


@pytest.mark.protects(
    "many-connections",
    "the metrics client with the most connections is the first to lose one",
    instead="return slow[:1]",
)
def test_one_client_with_many_connections_does_not_displace_others(
    lasting: tuple[str, int],
) -> None:
    """A connection with a started request keeps its slot while another address opens many."""
    with ExitStack() as open_ones:
        made = socket.create_connection(lasting, PATIENCE, source_address=("127.0.0.2", 0))
        open_ones.enter_context(made)
        made.sendall(b"GET /metrics HTT")
        for _ in range(2 * SLOW):
            open_ones.enter_context(connected(lasting, "GET"))
        made.sendall(b"P/1.1\r\n\r\n")
        assert made.recv(12) == b"HTTP/1.0 200"


@pytest.mark.protects("most-connections", "the number of pending metrics requests is limited")
def test_the_number_of_pending_whole_requests_is_bounded() -> None:
    """While a snapshot takes long, one address sends requests; another address keeps its slot."""
    most = 256
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=64))
        listener.setblocking(False)
        clients = stack.enter_context(contextlib.closing(Clients(listener, follows=False)))
        for number in range(most + 50):
            source = ("127.0.0.2" if number == 0 else "127.0.0.1", 0)
            made = socket.create_connection(listener.getsockname(), PATIENCE, source_address=source)
            stack.enter_context(made).sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            clients.wait(())
        while len(clients.whole()) < most:
            clients.wait(())
        assert len(clients.whole()) == most
        assert [each.peer for each in clients.whole()].count("127.0.0.2") == 1


def test_without_a_free_descriptor_a_slow_client_is_replaced(tmp_path: Path) -> None:
    """The new client takes the slot of a slow client."""
    with serving(tmp_path, spare=12) as address, ExitStack() as slow:
        for _ in range(SLOW // 2):
            slow.enter_context(connected(address, "GET"))
        assert status(address, "GET / HTTP/1.1\r\n\r\n") == 404

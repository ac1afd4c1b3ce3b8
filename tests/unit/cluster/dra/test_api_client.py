"""The client of the API server: real connections, and their possible failures."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from api_server import CUT, DRIP, GARBAGE, HANG, TOKEN, ApiServer, certify, serving
from hypothesis import given
from hypothesis import strategies as some
from timeouts import in_time

from gpuhook.base.errors import PluginError
from gpuhook.cluster.dra.access import Access
from gpuhook.cluster.dra.api_client import ApiClient, ApiError, WatchStream, _Chunks, segment

NODE = "/api/v1/nodes/n1"
SLICES = "/apis/resource.k8s.io/v1/resourceslices"


@pytest.fixture
def api(tmp_path: Path) -> Iterator[ApiServer]:
    with serving(tmp_path) as made:
        made.add("nodes", "n1", {})
        yield made


def client(api: ApiServer, url: str = "") -> ApiClient:
    folder = api.folder
    return ApiClient(Access(url or api.url, f"{folder}/ca.crt", token=f"{folder}/token"))


def events(watch: WatchStream, count: int) -> list[dict[str, object]]:
    """Return ``count`` events, or those that arrived until the watch was over."""
    found: list[dict[str, object]] = []
    with in_time(200):
        while len(found) < count and not watch.is_over:
            if watch.wait(30):
                found += watch.read()
    return found


def test_an_object_is_read_and_a_missing_one_is_an_error(api: ApiServer) -> None:
    assert client(api).ask("GET", NODE)["metadata"]["name"] == "n1"
    with pytest.raises(ApiError, match="refuses GET of /api/v1/nodes/n2: n2 not found") as caught:
        client(api).ask("GET", "/api/v1/nodes/n2")
    assert (caught.value.status, caught.value.reason) == (404, "NotFound")
    assert not caught.value.may_pass


def test_a_renewed_token_is_read_from_its_file(api: ApiServer) -> None:
    asking = client(api)
    asking.ask("GET", NODE)
    api.tokens = {"new"}
    with pytest.raises(ApiError, match="Unauthorized"):
        asking.ask("GET", NODE)
    (api.folder / "token").write_text("new")
    asking.ask("GET", NODE)


def test_a_client_certificate_gives_access(api: ApiServer) -> None:
    folder = api.folder
    key, crt = f"{folder}/client.key", f"{folder}/client.crt"
    access = Access(api.url, f"{folder}/ca.crt", certificate=crt, key=key)
    assert ApiClient(access).ask("GET", NODE)


def test_a_server_with_an_untrusted_certificate_is_refused(api: ApiServer, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    certify(other)
    asking = ApiClient(Access(api.url, f"{other}/ca.crt", token=f"{api.folder}/token"))
    with pytest.raises(ApiError, match="its certificate isn't valid"):
        asking.ask("GET", NODE)
    named = Access(api.url, f"{api.folder}/ca.crt", token=TOKEN.encode(), server_name="elsewhere")
    with pytest.raises(ApiError, match="its certificate isn't valid"):
        ApiClient(named).ask("GET", NODE)
    assert not api.asked


@pytest.mark.protects("no-token-said", "DRA: error messages don't contain the access token")
def test_no_error_message_contains_the_token(api: ApiServer) -> None:
    """The test's server repeats the request in its errors, as proxies do."""
    api.fail(500)
    with pytest.raises(ApiError, match=r"broken for Bearer \[token\]") as caught:
        client(api).ask("GET", NODE)
    assert TOKEN not in str(caught.value)


def test_a_refused_connection_is_an_error_that_may_pass(api: ApiServer) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(ApiError, match="Connection refused") as caught:
            client(api, f"https://127.0.0.1:{taken.getsockname()[1]}").ask("GET", NODE)
    assert caught.value.may_pass


def test_a_second_address_is_tried_when_the_first_is_silent(
    api: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server's name has two addresses; the first accepts connections and sends nothing."""
    look_up = socket.getaddrinfo
    with socket.create_server(("127.0.0.1", 0)) as silent:
        first = silent.getsockname()

        def both(*words: object, **more: object) -> list[object]:
            found = look_up(*words, **more)  # type: ignore[arg-type]
            return [(*found[0][:4], first), found[0]]

        monkeypatch.setattr(socket, "getaddrinfo", both)
        assert client(api).ask("GET", NODE, patience=2)["metadata"]["name"] == "n1"


@pytest.mark.parametrize("host", ["a..b", "x" * 70 + ".com", "\xdf" + "a" * 63])
def test_an_invalid_host_name_is_an_api_error(api: ApiServer, host: str) -> None:
    with pytest.raises(ApiError, match="can't be asked"):
        client(api, f"https://{host}").ask("GET", NODE)


@pytest.mark.protects(
    "whole-deadline",
    "DRA: an API request has one deadline for its whole duration",
    instead="self._inner.settimeout(5)",
)
@pytest.mark.parametrize("what", [HANG, DRIP])
def test_a_slow_server_causes_a_timeout(api: ApiServer, what: str) -> None:
    """A server that sends single bytes never exceeds the timeout of one read."""
    api.fail(what)
    began = time.monotonic()
    with in_time(200), pytest.raises(ApiError, match="doesn't answer in time"):
        client(api).ask("GET", NODE, patience=0.6)
    assert time.monotonic() - began < 150


@pytest.mark.parametrize("what", [CUT, GARBAGE])
def test_an_invalid_answer_is_a_temporary_error(api: ApiServer, what: str) -> None:
    api.fail(what)
    with pytest.raises(ApiError, match="can't be asked") as caught:
        client(api).ask("GET", NODE)
    assert caught.value.may_pass


def test_no_redirect_is_followed(api: ApiServer) -> None:
    api.fail(302)
    with pytest.raises(ApiError, match="refuses"):
        client(api).ask("GET", NODE)
    assert len(api.asked) == 1


def test_retry_after_sets_the_pause_within_limits(api: ApiServer) -> None:
    pauses = {"7": 7.0, "": 1.0, "Wed, 21 Oct 2026 07:28:00 GMT": 1.0, "99999": 300.0, "-1": 1.0}
    for said, expected in pauses.items():
        api.fail(429, retry_after=said)
        with pytest.raises(ApiError) as caught:
            client(api).ask("GET", NODE)
        assert (caught.value.pause, caught.value.may_pass) == (expected, True)


def test_failed_requests_are_retried_until_the_deadline(api: ApiServer) -> None:
    slept: list[float] = []
    asking = ApiClient(client(api).access, sleep=slept.append)
    api.fail(429, retry_after="2")
    api.fail(500)
    assert asking.insist("GET", NODE, 10)
    assert slept == [2.0, 0.4]
    api.fail(503, times=100)
    now = [0.0]
    asking = ApiClient(
        client(api).access, lambda: now[0], lambda seconds: now.append(now.pop() + seconds)
    )
    with pytest.raises(ApiError, match="refuses"):
        asking.insist("GET", NODE, 20)
    assert 10 < now[0] < 20
    api.faults = []
    with pytest.raises(ApiError):
        asking.insist("GET", "/api/v1/nodes/none", 20)
    assert api.count("GET", "none") == 1


# Watches ------------------------------------------------------------------------------------------


@pytest.fixture
def begun() -> Iterator[Callable[[ApiClient, dict[str, str]], WatchStream]]:
    """Return a function that starts watches; they are closed after the test."""
    with contextlib.ExitStack() as stack:
        yield lambda asking, query: stack.enter_context(
            contextlib.closing(asking.watch(SLICES, query))
        )


Begun = Callable[[ApiClient, dict[str, str]], WatchStream]


def test_a_watch_reports_matching_events_until_it_is_cut(api: ApiServer, begun: Begun) -> None:
    query = {"resourceVersion": "0", "fieldSelector": "spec.nodeName=n1"}
    watch = begun(client(api), query)
    for node in ("n1", "n2", "n1"):
        api.add(
            "resourceslices", f"s{api.version}", {"spec": {"nodeName": node}, "x": "y" * 99_999}
        )
    found = events(watch, 2)
    assert [each["type"] for each in found] == ["ADDED", "ADDED"]
    assert watch.read() == []
    api.cut_watches(b'{"type": "ADDED", "object": {"a')
    assert events(watch, 1) == []
    assert watch.is_over


def test_a_watch_ends_after_its_requested_time(api: ApiServer, begun: Begun) -> None:
    watch = begun(client(api), {"timeoutSeconds": "1"})
    assert events(watch, 1) == []
    assert watch.is_over


def test_a_watch_of_an_expired_version_is_an_error(api: ApiServer) -> None:
    api.forget()
    with pytest.raises(ApiError) as caught:
        client(api).watch(SLICES, {"resourceVersion": "5"})
    assert caught.value.status == 410


def test_an_invalid_watch_is_an_error(api: ApiServer, begun: Begun) -> None:
    asking = client(api)
    watch = begun(asking, {})
    api.cut_watches(b"<html>\n")
    with pytest.raises(ApiError, match="watch is invalid"):
        events(watch, 1)
    api.fail(GARBAGE)
    watch = begun(asking, {})
    assert events(watch, 1) == []  # the garbage has no complete line


def test_concurrent_requests_are_all_answered(api: ApiServer) -> None:
    asking = client(api)
    threads = [threading.Thread(target=asking.ask, args=("GET", NODE)) for _ in range(20)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert api.count("GET", "nodes") == 20


@given(some.lists(some.binary(min_size=1, max_size=40)), some.data())
def test_chunks_are_decoded_from_any_pieces(bodies: list[bytes], data: some.DataObject) -> None:
    raw = b"".join(b"%x;a=b\r\n%s\r\n" % (len(each), each) for each in bodies) + b"0\r\n\r\n"
    chunks, found = _Chunks(), b""
    while raw:
        size = data.draw(some.integers(1, len(raw)))
        found += chunks.feed(raw[:size])
        raw = raw[size:]
    assert found == b"".join(bodies)
    assert chunks.is_over


@given(some.binary(max_size=200))
def test_invalid_chunks_raise_only_value_error(raw: bytes) -> None:
    try:
        assert len(_Chunks().feed(raw)) <= len(raw)
    except ValueError:
        pass


@pytest.mark.protects(
    "names-in-paths", "DRA: an object's name can't lead to another path on the API server"
)
@pytest.mark.parametrize(
    "name", ["", "..", "a/b", "a%2f", "A", "a\n", "a b", "a..b", "-a", "x" * 254]
)
def test_invalid_object_names_are_refused(name: str) -> None:
    with pytest.raises(PluginError, match="can't be the name"):
        segment(name)
    assert segment("gpu-1.example.com") == "gpu-1.example.com"

"""Metrics of the services themselves: their text, and the process that serves it."""

import os
import re
import select
import signal
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from timeouts import in_time

from gpuhook.base.errors import MetricsError
from gpuhook.monitor.service_metrics import Calls, ServiceMetrics, listen

PATIENCE_S = 60


def counted() -> Calls:
    return Calls("gpuhook_test_call", "Calls", ("resource", "operation"))


def series(text: str) -> dict[tuple[str, ...], float]:
    """Return the samples, by name and by their label values in the order of the labels' names."""
    return {
        (each.name, *(each.labels[name] for name in sorted(each.labels))): each.value
        for family in text_string_to_metric_families(text)
        for each in family.samples
    }


def test_calls_failures_and_durations_are_counted_in_the_text() -> None:
    calls = counted()
    calls.note(("a", "prepare"), 0.02, failed=False)
    calls.note(("a", "prepare"), 7.0, failed=True)
    calls.note(("a", "prepare"), 99.0, failed=True)
    calls.note(("b", "prepare"), 0.005, failed=False)
    found = series(calls.text())
    assert found["gpuhook_test_calls_total", "prepare", "a"] == 3
    assert found["gpuhook_test_call_failures_total", "prepare", "a"] == 2
    assert found["gpuhook_test_call_failures_total", "prepare", "b"] == 0
    start = "gpuhook_test_call_seconds"
    assert found[f"{start}_sum", "prepare", "a"] == pytest.approx(106.02)
    assert found[f"{start}_count", "prepare", "a"] == 3
    buckets = {key[1]: found[key] for key in found if key[0] == f"{start}_bucket" and "b" in key}
    assert {*buckets.values()} == {1.0}, "a bound counts itself"
    buckets = {key[1]: found[key] for key in found if key[0] == f"{start}_bucket" and "a" in key}
    assert (buckets["0.01"], buckets["0.025"], buckets["10.0"], buckets["+Inf"]) == (0, 1, 2, 3)
    values = [buckets[key] for key in sorted(buckets, key=float)]
    assert values == sorted(values)


@pytest.mark.parametrize("value", ['a"b', "a\\b", "a\nb", 'x" 1\nother 2', "ü"])
def test_special_characters_in_labels_are_escaped(value: str) -> None:
    calls = counted()
    calls.note((value, "prepare"), 1.0, failed=False)
    found = series(calls.text())
    assert found["gpuhook_test_calls_total", "prepare", value] == 1
    assert {key[0].rpartition("_")[0] for key in found} <= {
        "gpuhook_test_calls", "gpuhook_test_call_failures", "gpuhook_test_call_seconds"
    }  # fmt: skip


@pytest.mark.parametrize(
    "address", ["", "9836", "127.0.0.1", "127.0.0.1:x", "127.0.0.1:65536", "127.0.0.1:٣"]
)
def test_an_invalid_metrics_address_is_refused(address: str) -> None:
    with pytest.raises(MetricsError, match=r"isn't an address.*--metrics-listen"):
        listen(address, "--metrics-listen")


class Served:
    """A service's loop, which handles metrics while it waits for something."""

    def __init__(self, address: str) -> None:
        self.said: list[str] = []
        self.metrics = ServiceMetrics(
            counted(), address, "--metrics-listen", self.said.append, time.monotonic
        )
        [self.url] = re.findall(r"http://\S+", self.said[0])

    def until(self, is_done: Callable[[], object]) -> None:
        end = time.monotonic() + PATIENCE_S
        while not is_done():
            assert time.monotonic() < end, self.said
            self.metrics.tend()
            select.select([], self.metrics.writers(), [], 0.01)

    def children(self) -> list[int]:
        found = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        names = {int(pid): Path(f"/proc/{pid}/comm").read_text().strip() for pid in found}
        return [pid for pid, name in names.items() if name == "gpuhook-http"]

    def page(self) -> str:
        """Return the metrics page once it contains everything that was counted."""
        with urllib.request.urlopen(self.url, timeout=PATIENCE_S) as answer:  # noqa: S310
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            return str(answer.read().decode())


@contextmanager
def served(address: str = "127.0.0.1:0") -> Iterator[Served]:
    made = Served(address)
    try:
        made.until(lambda: made.children() and not made.metrics.writers())
        yield made
    finally:
        made.metrics.end()


def count(page: str) -> float:
    return series(page).get(("gpuhook_test_calls_total", "prepare", "a"), 0)


@pytest.mark.parametrize("address", ["127.0.0.1:0", "[::1]:0"])
def test_the_newest_text_is_served(address: str) -> None:
    with served(address) as service:
        for number in range(1, 4):
            service.metrics.note(("a", "prepare"), 0.1, failed=False)
            service.until(lambda n=number: count(service.page()) == n)  # type: ignore[misc]
        for path, status in (("/", 404), ("/metrics/x", 404)):
            with pytest.raises(urllib.error.HTTPError) as raised:
                urllib.request.urlopen(service.url.replace("/metrics", path), timeout=9)  # noqa: S310
            assert raised.value.code == status
            raised.value.close()


@pytest.mark.protects(
    "service-metrics-unprivileged",
    "the process that serves a service's own metrics has no privileges",
    instead="pass",
)
def test_the_process_that_serves_metrics_has_no_privileges() -> None:
    with served() as service:
        assert service.page(), "it has started"
        [pid] = service.children()
        status = Path(f"/proc/{pid}/status").read_text()
        if os.geteuid() == 0:
            assert re.search(r"^Uid:\s+65534\s+65534\s+65534\s+65534$", status, re.MULTILINE)
            assert re.search(r"^Gid:\s+65534\s+65534\s+65534\s+65534$", status, re.MULTILINE)
            assert re.search(r"^CapPrm:\s+0+$", status, re.MULTILINE)
        assert re.search(r"^NoNewPrivs:\s+1$", status, re.MULTILINE)


def test_a_killed_metrics_process_is_started_again() -> None:
    with served() as service:
        service.metrics.note(("a", "prepare"), 0.1, failed=False)
        [pid] = service.children()
        os.kill(pid, signal.SIGKILL)
        service.until(lambda: service.children() not in ([], [pid]))
        service.until(lambda: count(service.page()) == 1)
        assert any("is started again" in each for each in service.said)


def connected(service: Served) -> socket.socket:
    port = int(service.url.rpartition(":")[2].partition("/")[0])
    return socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)


def test_slow_clients_do_not_delay_others_and_are_disconnected() -> None:
    """Slow clients beyond the maximum are disconnected."""
    with served() as service, ExitStack() as stack:
        silent = [stack.enter_context(connected(service)) for _ in range(40)]
        for each in silent[:20]:
            each.send(b"GET /metr")
        with in_time(PATIENCE_S):
            service.until(lambda: "gpuhook_test_calls_total" in service.page())
        with connected(service) as client:
            client.sendall(b"GET /metrics HTTP/1.1\r\nX: " + b"x" * (1 << 15))
            assert client.recv(100).startswith(b"HTTP/1.0 431 ")
        with connected(service) as client:
            client.sendall(b"\x16\x03\x01 hello\n")
            assert client.recv(100).startswith(b"HTTP/1.0 400 ")
        with connected(service) as client:
            client.sendall(b"HEAD /metrics HTTP/1.1\r\n\r\n")
            answer = b"".join(iter(lambda: client.recv(1 << 16), b""))
            assert answer.startswith(b"HTTP/1.0 200 OK")
            assert answer.endswith(b"\r\n\r\n")
        for each in silent:
            assert each.recv(1) == b"", "it is disconnected in the end"


def test_without_an_address_no_metrics_process_runs() -> None:
    said: list[str] = []
    metrics = ServiceMetrics(counted(), "", "--metrics-listen", said.append, time.monotonic)
    metrics.note(("a", "prepare"), 0.1, failed=False)
    metrics.tend()
    assert (metrics.deadline(), metrics.writers(), said) == (None, [], [])
    metrics.end()


def test_an_address_in_use_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(MetricsError, match=f"Nothing can listen at {address}"):
            listen(address, "--metrics-listen")

"""The publisher's thread: its start, new devices, failures, and turns with other publishers."""

import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import paper
import pytest
from api_server import ApiServer, serving
from dra_node import device, slices

from gpuhook.base.config.model import Config
from gpuhook.cluster.dra import publish
from gpuhook.cluster.dra import slices as dra
from gpuhook.cluster.dra.access import Access
from gpuhook.cluster.dra.publish import Publisher, wanted
from gpuhook.cluster.dra.slice_reconciler import SliceReconciler
from gpuhook.core import contract
from gpuhook.vendors import registry

Object = dict[str, Any]
THREAD = "gpuhook-publish"


class Devices:
    """Devices that a test defines."""

    def __init__(self, *contents: list[Object]) -> None:
        self.contents = contents

    def objects(self, kubernetes: tuple[int, int]) -> Sequence[Object]:
        return [{"kind": "DeviceClass"}, *slices(*self.contents)]

    def drivers(self) -> Sequence[str]:
        return ["gpu.example.com"]


@pytest.fixture
def api(tmp_path: Path) -> Iterator[ApiServer]:
    with serving(tmp_path) as made:
        made.add("nodes", "n1", {})
        yield made


class Started:
    """A publisher and the messages that it prints."""

    def __init__(self, api: ApiServer, devices: Devices, lock: str = "") -> None:
        self.api = api
        self.devices = devices
        self.said: list[str] = []
        access = Access(api.url, f"{api.folder}/ca.crt", token=f"{api.folder}/token")
        self.publisher = Publisher(access, "n1", self.said.append, lock=lock)
        self.publisher.start()
        self.want()

    def want(self) -> None:
        """Publish the current devices."""
        self.publisher.want(json.loads(json.dumps(wanted(self.devices))))

    def until(self, condition: Callable[[], object]) -> None:
        """Wait until a condition is true."""
        end = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < end, (self.said, self.api.asked)
            time.sleep(0.01)

    def names(self) -> list[str]:
        found = self.api.slices("n1")
        return [each["name"] for one in found for each in one["spec"].get("devices", [])]

    def stop(self) -> None:
        """Stop the publisher, and wait until its thread exits."""
        threads = [each for each in threading.enumerate() if each.name == THREAD]
        self.publisher.stop()
        self.until(lambda: any(not each.is_alive() for each in threads))


@pytest.fixture
def start(api: ApiServer) -> Iterator[Callable[..., Started]]:
    """Return a function that starts publishers; they are stopped after the test."""
    every: list[Started] = []

    def begin(*contents: list[Object], lock: str = "") -> Started:
        every.append(Started(api, Devices(*contents), lock))
        return every[-1]

    yield begin
    for each in every:
        each.publisher.stop()


def test_the_publisher_writes_changes_at_once_and_keeps_slices(
    start: Callable[..., Started],
) -> None:
    started = start([device("a")])
    started.until(lambda: started.names() == ["a"])
    started.devices.contents = ([device("a", "xid=79")],)
    began = time.monotonic()
    started.want()
    started.until(lambda: "taints" in str(started.api.slices()))
    assert time.monotonic() - began < 25  # at once, not at the next check after 30 seconds
    started.stop()
    assert started.names() == ["a"]  # the slices stay for the next plugin process
    assert started.said == []


def test_a_second_stop_closes_no_foreign_descriptor(start: Callable[..., Started]) -> None:
    """Another file has the descriptor's number by then."""
    started = start([device("a")])
    number = started.publisher._writer
    started.stop()
    others = [os.open("/dev/null", os.O_RDONLY)]
    if number not in others:
        others.append(os.dup2(others[0], number))
    try:
        started.want()
        started.publisher.stop()
        os.fstat(number)
    finally:
        for each in others:
            os.close(each)


def test_a_failed_publisher_restarts_and_reports_the_error_once(
    start: Callable[..., Started], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The publisher starts again, reports the cause once, and publishes all devices."""
    failures = [RuntimeError("of a test"), RuntimeError("of a test")]
    tend = SliceReconciler.tend

    def fail(keeper: SliceReconciler) -> None:
        if failures:
            raise failures.pop()
        tend(keeper)

    monkeypatch.setattr(SliceReconciler, "tend", fail)
    monkeypatch.setattr(publish, "_PAUSES", (0.01, 0.02))
    started = start([device("a")])
    started.until(lambda: started.names() == ["a"])
    assert started.said == ["The publisher failed: RuntimeError: of a test"]


@pytest.mark.protects("one-publisher", "DRA: only one of two plugin instances publishes devices")
def test_a_newer_publisher_waits_until_the_older_one_ends(
    start: Callable[..., Started], tmp_path: Path
) -> None:
    """The newer publisher also starts if the older one was killed."""
    lock = str(tmp_path / "lock")
    older = start([device("a")], lock=lock)
    older.until(lambda: older.names() == ["a"])
    newer = start([device("b")], lock=lock)
    asked = len(older.api.asked)
    time.sleep(3)
    assert older.names() == ["a"]
    assert len(older.api.asked) == asked
    older.stop()
    newer.until(lambda: newer.names() == ["b"])
    newer.stop()
    holding = ["flock", "--no-fork", lock, "sh", "-c", "echo; exec sleep 600"]
    with subprocess.Popen(holding, stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout is not None
            holder.stdout.readline()
            newest = start([device("c")], lock=lock)
            time.sleep(0.5)
            assert newest.names() == ["b"]
        finally:
            holder.kill()
    newest.until(lambda: newest.names() == ["c"])


def test_an_unusable_lock_is_reported_and_tried_again(
    start: Callable[..., Started], tmp_path: Path
) -> None:
    """A link in the lock's place is not followed."""
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")
    started = start([device("a")], lock=str(link))
    started.until(lambda: started.said)
    assert "link can't be opened" in started.said[0]
    assert not (tmp_path / "elsewhere").exists()
    assert started.names() == []
    link.unlink()
    started.until(lambda: started.names() == ["a"])


class Machine:
    """The devices of a simulated machine, as --dry-run prints them."""

    def __init__(self, vendor: str, root: Path, count: int) -> None:
        self.found = [
            (contract.load(registry.BUILT_IN[vendor]), paper.machine(vendor, root, count))
        ]

    def objects(self, kubernetes: tuple[int, int]) -> Sequence[Object]:
        choices = dra.Choices("n1", kubernetes=kubernetes)
        return dra.objects(self.found, choices, Config())[0]

    def drivers(self) -> Sequence[str]:
        return ["gpu.amd.com"]


def test_published_devices_conform_to_the_api_models(
    api: ApiServer, start: Callable[..., Started], tmp_path: Path
) -> None:
    """The API's own rules and models are used (tests/lib/dra_reader.py)."""
    reader = pytest.importorskip("dra_reader")
    (tmp_path / "root").mkdir()
    machine = Machine("amd", tmp_path / "root", 8)
    started = Started(api, machine)  # type: ignore[arg-type]
    started.until(lambda: len(started.names()) == 8)
    reader.check(as_sent(api))
    started.stop()
    assert started.said == []
    assert len(json.dumps(wanted(machine))) < 100_000


def as_sent(api: ApiServer) -> list[Object]:
    """Return the slices without the fields that only a server writes."""
    found = api.slices()
    for each in found:
        del each["metadata"]["resourceVersion"]
    return found

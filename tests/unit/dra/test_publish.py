"""The process that publishes, as its parent has it: started, woken, killed, in turns."""

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import paper
import pytest
from api_server import ApiServer, serving
from dra_node import device, slices

from gpuhook.ground.config.model import Config
from gpuhook.start import contract
from gpuhook.tools.dra.access import Access
from gpuhook.tools.dra.publish import Publisher, line
from gpuhook.tools.kubernetes import dra
from gpuhook.vendors import registry

Object = dict[str, Any]


class Devices:
    """What there is, as a test says."""

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
    """A publisher, and the sentences that its parent says."""

    def __init__(self, api: ApiServer, devices: Devices, lock: str = "") -> None:
        self.api = api
        self.devices = devices
        self.said: list[str] = []
        access = Access(api.url, f"{api.folder}/ca.crt", token=f"{api.folder}/token")
        self.publisher = Publisher(access, "n1", devices, self.said.append, lock=lock)
        self.publisher.start()

    def until(self, condition: Callable[[], object]) -> None:
        """Tend it until something is so."""
        end = time.monotonic() + 20
        while not condition():
            self.publisher.tend()
            assert time.monotonic() < end, (self.said, self.api.asked)
            time.sleep(0.01)

    def names(self) -> list[str]:
        found = self.api.slices("n1")
        return [each["name"] for one in found for each in one["spec"].get("devices", [])]


@pytest.fixture
def start(api: ApiServer) -> Iterator[Callable[..., Started]]:
    """Return what starts publishers, which end with the test."""
    every: list[Started] = []

    def begin(*contents: list[Object], lock: str = "") -> Started:
        every.append(Started(api, Devices(*contents), lock))
        return every[-1]

    yield begin
    for each in every:
        each.publisher.stop()


def test_from_start_to_stop(start: Callable[..., Started]) -> None:
    started = start([device("a")])
    started.until(lambda: started.names() == ["a"])
    started.devices.contents = ([device("a", "xid=79")],)
    began = time.monotonic()
    started.publisher.wake()
    started.until(lambda: "taints" in str(started.api.slices()))
    assert time.monotonic() - began < 5
    pid = started.publisher.pid
    started.publisher.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert started.names() == ["a"]  # for who comes next
    assert started.said == []


def test_one_that_is_killed(start: Callable[..., Started]) -> None:
    started = start([device("a")])
    started.until(lambda: started.names() == ["a"])
    os.kill(started.publisher.pid, signal.SIGKILL)
    started.until(lambda: started.said)
    assert started.said == ["What publishes devices ended with signal 9; it is started again"]
    started.api.wipe("n1")
    started.until(lambda: started.names() == ["a"])


def test_two_at_an_update(start: Callable[..., Started], tmp_path: Path) -> None:
    """The newer one begins when the older one has ended, also where that was killed."""
    lock = str(tmp_path / "lock")
    older = start([device("a")], lock=lock)
    older.until(lambda: older.names() == ["a"])
    newer = start([device("b")], lock=lock)
    asked = len(older.api.asked)
    end = time.monotonic() + 3
    newer.until(lambda: time.monotonic() > end)
    assert older.names() == ["a"]
    assert len(older.api.asked) == asked
    os.kill(older.publisher.pid, signal.SIGKILL)
    newer.until(lambda: newer.names() == ["b"])


def test_a_lock_that_can_t_be(start: Callable[..., Started], tmp_path: Path) -> None:
    """Not a link that somebody put there; the child says so, and is started again."""
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    started = start([device("a")], lock=str(tmp_path / "link"))
    started.until(lambda: started.said)
    assert started.said == ["What publishes devices ended with status 1; it is started again"]
    assert not (tmp_path / "elsewhere").exists()
    assert started.names() == []


class Machine:
    """The devices of a simulated machine, as --dry-run prints them."""

    def __init__(self, vendor: str, root: Path, count: int) -> None:
        self.found = [(contract.load(registry.KNOWN[vendor]), paper.machine(vendor, root, count))]

    def objects(self, kubernetes: tuple[int, int]) -> Sequence[Object]:
        choices = dra.Choices("n1", kubernetes=kubernetes)
        return dra.objects(self.found, choices, Config())[0]

    def drivers(self) -> Sequence[str]:
        return ["gpu.amd.com"]


def test_what_a_machine_has(api: ApiServer, start: Callable[..., Started], tmp_path: Path) -> None:
    """As the API's own rules and models have it (tests/lib/dra_reader.py)."""
    reader = pytest.importorskip("dra_reader")
    (tmp_path / "root").mkdir()
    machine = Machine("amd", tmp_path / "root", 8)
    started = Started(api, machine)  # type: ignore[arg-type]
    started.until(lambda: len(started.names()) == 8)
    reader.check(as_sent(api))
    started.publisher.stop()
    assert started.said == []
    assert len(line(machine)) < 100_000


def as_sent(api: ApiServer) -> list[Object]:
    """Return the slices without what only a server writes."""
    found = api.slices()
    for each in found:
        del each["metadata"]["resourceVersion"]
    return found

"""Searches for devices by a child process: a hung driver delays no other request."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import vendors
from gpuhook.base.config.model import Config
from gpuhook.metrics.inventories import Inventories
from gpuhook.monitor.host import child
from gpuhook.monitor.machine import HostDevices
from gpuhook.vendors import registry

PATIENCE_S = 300.0  # a test's time limit in seconds, for a busy host with a slow disk
VENDOR = """
import json
import os
import signal
import time
from pathlib import Path

from gpuhook.base.errors import DriverError, NoDriverError
from gpuhook.core.inventory.model import Device, Inventory
from gpuhook.core.contract import Vendor
from hanging import names


class Hanging(Vendor):
    names = names
    inventory = Inventory

    def cache_key(self, config):
        return [json.loads(Path({path!r}).read_text()).get("around", 0)]

    def discover(self, config):
        said = json.loads(Path({path!r}).read_text())
        if "hangs" in said:
            signal.pause()
        if "late" in said:
            time.sleep(said["late"])
        if "ends" in said:
            os._exit(3)
        if "absent" in said:
            raise NoDriverError(said["absent"], "Load it")
        if "fails" in said:
            raise DriverError(said["fails"], "Mend it")
        devices = tuple(Device(each, each[-1], {{"uuid": (each,)}}) for each in said["devices"])
        return Inventory("hanging", "/", "1", devices, ())


VENDOR = Hanging()
"""


class Made:
    """The host's devices, the messages about them, and the searches for them."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "driver.json"
        self.late = 0.0
        config = Config()
        config.state_dir = str(folder / "state")
        config.nvml_timeout = PATIENCE_S
        self.inventories = Inventories(self.clock)
        follow = self.inventories.follow
        self.machine = HostDevices(config, lambda _: None, self.clock, follow=follow, linked=False)

    def clock(self) -> float:
        return time.monotonic() + self.late

    def drive(self, **words: Any) -> None:
        self.path.write_text(json.dumps(words))

    def look(self, patience: float = PATIENCE_S) -> list[str]:
        """Search for devices; return their ids."""
        self.inventories.wait_for(patience)
        self.machine.refresh()
        return [device.id for _, found in self.machine.found for device in found.devices]


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Made]:
    monkeypatch.setattr(registry, "BUILT_IN", {})
    monkeypatch.setattr(child, "_REAP", PATIENCE_S)  # a busy host may end a child slowly
    machine_path = tmp_path / "driver.json"
    text = VENDOR.format(path=str(machine_path))
    with vendors.known(tmp_path / "packages", "hanging", vendor=text):
        found = Made(tmp_path)
        yield found
        found.inventories.let_go(0)


def children() -> list[int]:
    text = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    return [int(pid) for pid in text.split()]


@pytest.mark.parametrize("can_save", [True, False])
def test_devices_are_searched_for_again_after_a_change(
    made: Made, can_save: bool, tmp_path: Path
) -> None:
    if not can_save:
        (tmp_path / "state").write_text("a file in the way")
    made.drive(devices=["a0", "a1"])
    assert made.look() == ["a0", "a1"]
    assert made.look(0.0) == ["a0", "a1"]  # still fresh, so the driver isn't asked
    made.drive(devices=["a0"], around=1)
    assert made.look() == ["a0"]
    assert made.inventories.problems() == []


def test_a_hung_driver_delays_no_caller(made: Made) -> None:
    made.drive(devices=["a0"])
    assert made.look() == ["a0"]
    before = children()
    made.drive(hangs=True, around=1)
    for _ in range(3):
        assert made.look(0.01) == ["a0"]
    [problem] = made.inventories.problems()
    assert "takes long" in problem
    [pid] = {*children()} - {*before}
    made.late += 2 * PATIENCE_S  # longer than nvml-timeout and all other time limits
    assert made.look(0.01) == ["a0"]
    assert "didn't end in time" in str(made.machine.failures()["hanging"])
    assert pid not in children()
    made.drive(devices=["a0", "a1"], around=2)
    assert made.look() == ["a0", "a1"]
    assert not made.machine.failures()


def test_devices_found_by_a_slow_child_process_appear_later(made: Made) -> None:
    made.drive(devices=["a0"], late=0.5)
    assert made.look(0.0) == []
    end = time.monotonic() + PATIENCE_S
    while not made.look(0.0) and time.monotonic() < end:
        time.sleep(0.01)
    assert made.look(0.0) == ["a0"]


def test_a_failing_driver_is_reported_and_a_missing_one_is_not(made: Made) -> None:
    made.drive(absent="There is none")
    assert made.look() == []
    assert not made.machine.failures()
    assert str(made.machine.why_nothing()) == "There is none. Load it."
    made.drive(fails="It is broken", around=1)
    made.look()
    assert str(made.machine.failures()["hanging"]) == "It is broken. Mend it."
    made.drive(ends=True, around=2)
    made.look()
    assert "didn't end in time" in str(made.machine.failures()["hanging"])


def test_letting_go_ends_the_child_process_and_delays_the_next(made: Made) -> None:
    before = children()
    made.drive(hangs=True)
    made.look(0.01)
    assert len(children()) == len(before) + 1
    made.inventories.let_go(30.0)
    assert children() == before
    made.look(0.01)
    assert children() == before
    made.late += 31.0
    made.look(0.01)
    assert len(children()) == len(before) + 1

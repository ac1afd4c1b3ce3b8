"""Searches for devices of a made-up vendor, whose driver obeys a file that a test writes."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import vendors
from gpuhook.base.config.model import Config
from gpuhook.monitor.machine import HostDevices
from gpuhook.vendors import registry

VENDOR = """
import json
from pathlib import Path

from gpuhook.base.errors import DriverError, NoDriverError
from gpuhook.core.inventory.model import Device, Inventory
from gpuhook.core.contract import Vendor
from made import names


class Remembering(Inventory):
    def remembering(self, before):
        here = [*self.devices, *(each for each in before.devices if int(each.label) in self.lost)]
        again = [int(device.label) for device in here]
        lost = tuple(number for number in self.lost if number not in again)
        facts = (self.vendor, self.root, self.version)
        return Remembering(*facts, tuple(here), (), lost=lost)


class Made(Vendor):
    names = names
    inventory = Remembering

    def cache_key(self, config):
        return [json.loads(Path({path!r}).read_text()).get("around", 0)]

    def discover(self, config):
        said = json.loads(Path({path!r}).read_text())
        with open({path!r} + ".asked", "a") as asked:
            asked.write("x")
        if "absent" in said:
            raise NoDriverError(said["absent"], "Load it")
        if "fails" in said:
            raise DriverError(said["fails"], "Mend it")
        devices = tuple(Device(each, each[-1], {{"uuid": (each,)}}) for each in said["devices"])
        return Remembering("made", "/", "1", devices, (), lost=tuple(said.get("lost", ())))


VENDOR = Made()
"""
LINKS = """
def links(config, inventory):
    ids = [device.id for device in inventory.devices]
    return {each: {other: 1 for other in ids if other != each} for each in ids}
"""


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Made:
    """The host's devices, with a clock and with the messages about them."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "driver.json"
        self.said: list[str] = []
        self.clock = Clock()
        self.config = Config()
        self.config.state_dir = str(folder / "state")

    def build(self) -> HostDevices:
        return HostDevices(self.config, self.said.append, self.clock)

    def drive(self, **words: Any) -> None:
        self.path.write_text(json.dumps(words))

    @property
    def asked(self) -> int:
        """Return the number of queries to the driver."""
        path = Path(f"{self.path}.asked")
        return len(path.read_text()) if path.exists() else 0


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Made]:
    monkeypatch.setattr(registry, "BUILT_IN", {})
    machine = Made(tmp_path)
    text = VENDOR.format(path=str(machine.path))
    with vendors.known(tmp_path / "packages", "made", vendor=text, links=LINKS):
        yield machine


def ids(machine: HostDevices) -> list[str]:
    return [device.id for _, inventory in machine.found for device in inventory.devices]


@pytest.mark.parametrize("can_save", [True, False])
def test_a_driver_is_queried_only_after_a_change(made: Made, can_save: bool) -> None:
    if not can_save:
        Path(made.config.state_dir).write_text("a file in the way")
    made.drive(devices=["a0", "a1"])
    machine = made.build()
    assert machine.refresh()
    assert not any(machine.refresh() for _ in range(5))
    assert (made.asked, ids(machine)) == (1, ["a0", "a1"])
    assert machine.links == {"a0": {"a1": 1}, "a1": {"a0": 1}}
    made.drive(devices=["a0"], around=1)
    assert machine.refresh()
    assert (made.asked, ids(machine), machine.links) == (2, ["a0"], {"a0": {}})
    assert len(made.said) == 2


def test_a_missing_driver_is_not_queried_repeatedly(made: Made) -> None:
    made.drive(absent="There is none")
    machine = made.build()
    assert machine.refresh()
    assert not any(machine.refresh() for _ in range(5))
    assert (made.asked, machine.found, made.said) == (1, [], [])
    assert str(machine.why_nothing()) == "There is none. Load it."
    made.drive(devices=["a0"], around=1)
    assert machine.refresh()
    assert ids(machine) == ["a0"]
    assert machine.why_nothing() is None
    made.drive(absent="Unloaded", around=2)
    assert machine.refresh()
    assert (ids(machine), machine.links) == ([], {})
    assert made.said[-1] == "made: Unloaded. Load it."


def test_a_failing_driver_is_retried_less_often_and_reported_once(made: Made) -> None:
    made.drive(devices=["a0"])
    machine = made.build()
    machine.refresh()
    made.drive(fails="It hangs", around=1)
    assert machine.refresh()
    assert [each.cause for each in machine.failures().values()] == ["It hangs"]
    assert ids(machine) == ["a0"]  # the last known ids; the failure prevents their allocation
    assert machine.present == []
    times = []
    for _ in range(4000):
        before = made.asked
        made.clock.now += 1.0
        assert not machine.refresh()
        times += [made.clock.now - 1000.0] * (made.asked - before)
    assert times[:5] == [30.0, 90.0, 210.0, 450.0, 930.0]
    assert times[-1] - times[-2] == 600.0
    assert [line for line in made.said if "hangs" in line] == ["made: It hangs. Mend it."]
    machine.refresh(eager=True)  # an eager refresh ignores the pauses
    made.drive(devices=["a0"], around=2)
    assert machine.refresh()
    assert machine.failures() == {}


def test_a_lost_device_keeps_its_last_known_data(made: Made) -> None:
    made.drive(devices=["a0", "a1"])
    machine = made.build()
    machine.refresh()
    made.drive(devices=["a0"], lost=[1])
    assert machine.ask(["a1"]) == {"a0"}
    assert machine.refresh()
    assert (ids(machine), machine.lost()) == (["a0", "a1"], ["a1"])
    asked = made.asked
    assert not any(machine.refresh() for _ in range(5))
    assert made.asked == asked
    made.drive(devices=["a0", "a1"])
    assert machine.ask(["a1"]) == {"a0", "a1"}
    machine.refresh()
    assert machine.lost() == []


def test_only_drivers_of_the_given_devices_are_queried(made: Made) -> None:
    made.drive(devices=["a0"])
    machine = made.build()
    machine.refresh()
    assert machine.ask(["b0"]) == set()
    assert made.asked == 1
    made.drive(fails="It hangs")
    assert machine.ask(["a0"]) == set()
    assert ids(machine) == ["a0"]

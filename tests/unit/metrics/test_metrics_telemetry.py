"""The child process that queries a driver: it answers, hangs, exits and is started again."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from gpuhook.base.config.loader import load
from gpuhook.base.config.model import Config
from gpuhook.metrics.observer import Observer
from gpuhook.monitor.host.child import Channel, Work
from gpuhook.monitor.telemetry import FileTelemetry, TelemetryWorker
from gpuhook.vendors import registry

HERE: Any = SimpleNamespace(root="/", version="1", devices=[SimpleNamespace(id="GPU-1", label="0")])


class Driver:
    """A vendor's ``telemetry`` whose child runs a function."""

    def __init__(self, behave: Work) -> None:
        self.behave = behave
        self.silent: list[list[str]] = []  # devices left out, for each started child

    def can_ask(self, inventory: object) -> bool:
        return inventory is not None

    def facts(self, inventory: object) -> dict[str, object]:
        return {}

    def begin(self, config: object, inventory: object, but: Any) -> Work:
        self.silent.append([*but])
        return self.behave


def write(talk: Channel, text: str) -> None:
    os.write(talk._fd, text.encode() + b"\n")


def answer(talk: Channel) -> None:
    talk.say({"ready": 1})
    for question in talk.asked():
        talk.say({"xid": 79, "gpu": "GPU-1"})
        write(talk, "nonsense")
        devices: dict[str, object] = {"GPU-1": {}}
        talk.say({"answer": question["ask"], "devices": devices, "failed": {"GPU-2": "no"}})


def without_failure(talk: Channel) -> None:
    talk.say({"ready": 1})
    for question in talk.asked():
        talk.say({"answer": question["ask"], "devices": {}})


def hang(talk: Channel) -> None:
    talk.say({"ready": 1})
    talk.say({"asking": "GPU-1"})
    signal.pause()


def end(talk: Channel) -> None:
    talk.say({"error": "NVML failed: no"})


def fail_at_once(_: Channel) -> None:
    raise ValueError("not so")


def fail_later(talk: Channel) -> None:
    talk.say({"ready": 1})
    for _ in talk.asked():
        raise OSError(5, "Input/output error")


def crash(talk: Channel) -> None:
    talk.say({"ready": 1})
    os.kill(os.getpid(), signal.SIGABRT)


def close(talk: Channel) -> None:
    os.close(talk._fd)
    signal.pause()


@pytest.fixture
def made() -> Iterator[Callable[..., tuple[TelemetryWorker, Driver]]]:
    config: Config = load("/dev/null")
    every = []

    def make(behave: Any, clock: Any = time.monotonic) -> tuple[TelemetryWorker, Driver]:
        driver = Driver(behave)
        every.append(TelemetryWorker(driver, "Acme", config, clock, 0.3))
        return every[-1], driver

    yield make
    for each in every:
        each.let_go()


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_one_child_process_answers_every_query(made: Any) -> None:
    asking, driver = made(answer)
    for _ in range(3):
        assert asking.ask(HERE)["devices"] == {"GPU-1": {}}
    assert len(driver.silent) == 1
    assert asking.xids_of("GPU-1") == {79: 3}
    assert asking.errors == {"device": 3}
    assert asking.problem == "Acme: GPU-2: no"


@pytest.mark.parametrize(
    ("behave", "kind", "problem"),
    [
        (fail_at_once, "failed", "Acme: ValueError: not so"),
        (fail_later, "failed", "Acme: OSError: [Errno 5] Input/output error"),
        (end, "failed", "Acme: NVML failed: no"),
        (crash, "ended", "Acme: the process that queries the driver has ended with signal 6"),
        (close, "ended", "Acme: the process that queries the driver has ended with signal 9"),
    ],
)
@pytest.mark.parametrize("late", [False, True])
def test_the_reason_a_child_process_ended_is_reported(
    behave: Any, kind: str, problem: str, late: bool, made: Any
) -> None:
    """This includes a child that exits between two queries."""
    asking, _ = made(behave)
    if late and behave is not fail_later:
        asking._begin(behave)
        asking._devices = (HERE.root, HERE.version, ["GPU-1"])
        if behave is not close:
            os.waitid(os.P_PID, asking.pid, os.WEXITED | os.WNOWAIT)
    assert asking.ask(HERE) is None
    assert (asking.problem, asking.errors) == (problem, {kind: 1})


def without_events(talk: Channel) -> None:
    talk.say({"ready": 1})
    talk.say({"watched": 0, "unwatched": {"GPU-1": "Not Supported"}})
    without_failure(talk)


def test_unsupported_xid_events_cause_a_note_and_no_problem(made: Any) -> None:
    asking, driver = made(without_events)
    for _ in range(2):
        assert asking.ask(HERE) is not None
        assert (asking.problem, asking.errors) == ("", {})
        assert asking.note == "Acme: errors (XIDs) aren't counted of 0 (Not Supported)"
        assert asking.xids_of("GPU-1") is None
    asking.let_go()
    driver.behave = answer
    asking.ask(HERE)
    assert (asking.note, asking.xids_of("GPU-1")) == ("", {79: 1})


def test_a_hung_driver_costs_one_timeout_and_its_device(made: Any) -> None:
    now = [1000.0]
    asking, driver = made(hang, lambda: time.monotonic() + now[0])
    before = time.monotonic()
    assert asking.ask(HERE) is None
    assert time.monotonic() - before < 600
    assert asking.errors == {"timeout": 1}
    assert "hangs in GPU-1" in asking.problem
    assert asking.ask(HERE) is None  # no new child is started at once
    assert len(driver.silent) == 1
    now[0] += 2
    driver.behave = without_failure
    for _ in range(2):
        assert asking.ask(HERE) is not None
        assert asking.problem == (
            "Acme: device 0 is left out for 300 seconds, because the driver hung in it"
        )
    assert driver.silent == [[], ["GPU-1"]]
    now[0] += 400  # the 300 seconds are over
    assert asking.ask(HERE) is not None
    assert driver.silent[-1] == []
    assert asking.problem == ""


class Sysfs:
    """A vendor's ``telemetry`` that reads files, where the files of GPU-1 hang."""

    def read(self, inventory: Any, asking: Callable[[str], bool]) -> dict[str, Any]:
        found = {}
        for device in inventory.devices:
            if asking(device.id):
                if device.id == "GPU-1":
                    signal.pause()
                found[device.id] = {"power_watts": 7.5}
        return found


def test_hung_device_files_cost_one_timeout_and_their_device(made: Any) -> None:
    """A GPU's files hang while it is reset; the exporter itself never waits for them."""
    now = [1000.0]
    asking, _ = made(None, lambda: time.monotonic() + now[0])
    asking._module = FileTelemetry(Sysfs())
    devices = [SimpleNamespace(id=f"GPU-{number}", label=str(number)) for number in range(3)]
    here = SimpleNamespace(root="/", version="1", devices=devices)
    assert asking.ask(here) is None
    assert asking.problem == "Acme: the driver hangs in GPU-1"
    assert asking.errors == {"timeout": 1}
    now[0] += 2
    for _ in range(2):
        assert asking.ask(here)["devices"] == {
            "GPU-0": {"power_watts": 7.5},
            "GPU-2": {"power_watts": 7.5},
        }
    assert "device 1 is left out for 300 seconds" in asking.problem


def test_a_vendors_files_are_read_by_a_child() -> None:
    observer = Observer(load("/dev/null"))
    for name in ("amd", "intel_gpu"):
        asking = observer._asking(registry.BUILT_IN[name])
        assert asking is not None
        assert isinstance(asking._module, FileTelemetry)
    assert observer._asking(registry.BUILT_IN["neuron"]) is None


@pytest.mark.protects(
    "innocent-device",
    "a device that has answered isn't left out of the metrics when the driver hangs later",
    instead="pass",
)
def test_a_device_that_answered_before_a_hang_is_not_left_out(made: Any) -> None:
    """The child hangs in no device after its answer, or it isn't scheduled."""

    def behave(talk: Channel) -> None:
        talk.say({"ready": 1})
        for question in talk.asked():
            if question["ask"] > 1:
                signal.pause()
            talk.say({"asking": "GPU-1"})
            talk.say({"answer": question["ask"], "devices": {}})

    telemetry, driver = made(behave)
    assert telemetry.ask(HERE) is not None
    assert telemetry.ask(HERE) is None
    assert telemetry.problem == "Acme: the driver hangs"
    telemetry.again = 0.0
    telemetry.ask(HERE)
    assert driver.silent == [[], []]


@pytest.mark.parametrize(
    "said",
    [
        '"failed": 7',
        '"devices": []',
        '"devices": {"GPU-1": 7}',
        '"devices": {"GPU-1": {"processes": [[1, 2], [1]]}}',
        '"devices": {"GPU-1": {"processes": [["1", 2]]}}',
        '"devices": {"GPU-1": {"sm": {"one": 0.5}}}',
        '"devices": {"GPU-1": {"utilization": NaN}}',
        '"devices": {"GPU-1": {"power_watts": "much"}}',
        f'"devices": {{"GPU-1": {{"energy_joules": {10**400}}}}}',
    ],
)
def test_a_malformed_answer_ends_only_the_child_process(made: Any, said: str) -> None:
    def speak(talk: Channel) -> None:
        talk.say({"ready": 1})
        for question in talk.asked():
            write(talk, f'{{"answer": {question["ask"]}, {said}}}')

    asking, _ = made(speak)
    assert asking.ask(HERE) is None
    assert asking.errors == {"failed": 1}
    assert asking.pid == 0


def test_an_ended_child_process_is_counted_and_replaced(made: Any) -> None:
    now = [1000.0]
    asking, driver = made(end, lambda: time.monotonic() + now[0])
    assert asking.ask(HERE) is None
    assert asking.errors == {"failed": 1}
    assert asking.problem == "Acme: NVML failed: no"
    now[0] += 2
    driver.behave = answer
    assert asking.ask(HERE) is not None
    os.kill(asking.pid, signal.SIGKILL)
    assert asking.ask(HERE) is None
    assert asking.errors["ended"] == 1


def test_letting_go_ends_the_child_process(made: Any) -> None:
    now = [1000.0]
    asking, _ = made(answer, lambda: time.monotonic() + now[0])
    assert asking.ask(HERE) is not None
    first = asking.pid
    asking.let_go(30)
    assert is_gone(first)
    assert asking.ask(HERE) is None
    now[0] += 31
    assert asking.ask(HERE) is not None
    second = asking.pid
    asking.let_go()
    assert is_gone(second)
    assert asking.ask(HERE) is not None


def test_changed_devices_get_a_new_child_process(made: Any) -> None:
    asking, driver = made(answer)
    assert asking.ask(HERE) is not None
    first = asking.pid
    other: Any = SimpleNamespace(root="/", version="2", devices=[])
    assert asking.ask(other) is not None
    assert len(driver.silent) == 2
    assert is_gone(first)
    assert asking.ask(None) is None

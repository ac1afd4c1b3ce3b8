"""gpuhook watch sees the kernel's events and every other change, and keeps the inventory fresh."""

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.commands import run, stop, wait_until
from harness.driver import Driver, simulate
from harness.installation import Installation, write_config

from gpuhook.config import Config
from gpuhook.start.watch import Event, Events, concerns_us

NULL = Path("/sys/class/mem/null/uevent")  # writing to it makes the kernel send an event


def about_null(event: Event) -> bool:
    return event.get("DEVPATH") == "/devices/virtual/mem/null"


def test_an_event_ends_the_wait(workspace: Path) -> None:
    timer = threading.Timer(0.2, NULL.write_text, ["change"])
    with Events(about_null) as events:
        timer.start()
        before = time.monotonic()
        assert events.wait(20.0)
        assert time.monotonic() - before < 15.0


def test_other_events_do_not(workspace: Path) -> None:
    timer = threading.Timer(0.2, NULL.write_text, ["change"])
    with Events(lambda event: concerns_us(event, Config())) as events:
        timer.start()
        before = time.monotonic()
        assert not events.wait(1.0)
        assert time.monotonic() - before >= 1.0
    timer.join()


class Watched:
    """A simulated driver, and gpuhook watch running over it."""

    def __init__(self, installation: Installation, folder: Path) -> None:
        self._installation = installation
        self._root = folder / "driver"
        self.simulate("--gpus=1")
        self.config = write_config(folder / "config", self._root, ["runc"])
        self.log = folder / "log"
        words = ["watch", "--interval=0.2", f"--config={self.config}"]
        with self.log.open("wb") as log:
            environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
            argv = [str(installation.command), *words]
            self.process = subprocess.Popen(argv, stdout=log, stderr=log, env=environment)

    def simulate(self, *options: str) -> Driver:
        return simulate(self._installation, self._root, *options)

    def saved(self) -> str:
        """Return what the doctor says of the saved inventory, which it never makes anew."""
        words = ["--format=json", f"--config={self.config}"]
        done = run([self._installation.command, "doctor", *words])
        findings = json.loads(done.stdout)["findings"]
        [message] = [each["message"] for each in findings if each["check"] == "saved-inventory"]
        return str(message)

    def wait_for(self, words: str, times: int = 1) -> None:
        """Wait until the words were printed that often."""
        wait_until(lambda: self.log.read_text().count(words) == times, f"{words!r} is printed")


@pytest.fixture
def watched(workspace: Path, installation: Installation) -> Iterator[Watched]:
    folder = workspace / "watched"
    folder.mkdir()
    watch = Watched(installation, folder)
    yield watch
    if watch.process.poll() is None:
        stop(watch.process)
    run(["rm", "-rf", folder]).ok()


def test_a_change_is_saved_before_anyone_asks(watched: Watched) -> None:
    watched.wait_for("1 GPUs, 0 MIG devices")
    watched.simulate("--gpus=3")
    watched.wait_for("3 GPUs, 0 MIG devices")
    assert "3 GPUs, 0 MIG devices" in watched.saved()
    watched.simulate("--gpus=3", "--model=H100", "--mig=0:1g.10gb,1g.10gb")
    watched.wait_for("3 GPUs, 2 MIG devices")
    assert "3 GPUs, 2 MIG devices" in watched.saved()


def test_a_driver_that_goes_is_told_once(watched: Watched) -> None:
    watched.wait_for("1 GPUs")
    watched.simulate("--fail=not-loaded")
    watched.wait_for("Driver Not Loaded")
    time.sleep(1.0)
    assert watched.log.read_text().count("Driver Not Loaded") == 1
    watched.simulate("--gpus=2")
    watched.wait_for("2 GPUs")


def test_a_process_stands_ready_as_long_as_it_runs(watched: Watched) -> None:
    watched.wait_for("1 GPUs")
    folder = Path(f"/run/gpuhook/launcher{watched.config}/ready")

    def standing() -> set[int]:
        """Return who stands ready; a watch that was killed before leaves a name behind."""
        names = [path.name for path in folder.glob("[0-9]*")]
        return {int(name) for name in names if Path("/proc", name).exists()}

    wait_until(lambda: bool(standing()), "a process stands ready")
    [first] = standing()
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: bool(standing() - {first}), "another does")
    [second] = standing() - {first}
    stop(watched.process)
    wait_until(lambda: not Path(f"/proc/{second}").exists(), "it ends with the watch")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_when_told(watched: Watched, number: signal.Signals) -> None:
    watched.wait_for("1 GPUs")
    watched.process.send_signal(number)
    assert watched.process.wait(10.0) == 0

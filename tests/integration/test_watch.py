"""gpuhook watch, which notices all changes and kernel events and updates the inventory."""

import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from harness.commands import Result, run, stop, wait_until
from harness.driver import Driver, simulate
from harness.installation import Installation, write_config
from harness.podman import cdi_folder

from gpuhook.base.config.model import Config
from gpuhook.core.cdi import folders
from gpuhook.monitor.host.uevents import Event
from gpuhook.monitor.vendors.survey import concerns_us
from gpuhook.tools.cdi.managed_specs import last_errors
from gpuhook.tools.watch import DeviceEvents

# The numbers of the system calls that a watch waits in, select or pselect6: asm/unistd.h.
SELECT = {"x86_64": ("23", "270"), "aarch64": ("72",)}[os.uname().machine]
NULL = Path("/sys/class/mem/null/uevent")  # a write to it makes the kernel send an event
ZERO = Path("/sys/class/mem/zero/uevent")


def about_null(event: Event) -> bool:
    return event.get("DEVPATH") == "/devices/virtual/mem/null"


def test_an_event_ends_the_wait(workspace: Path) -> None:
    timer = threading.Timer(0.2, NULL.write_text, ["change"])
    with DeviceEvents(about_null) as events:
        timer.start()
        before = time.monotonic()
        assert events.wait(900.0)
        assert time.monotonic() - before < 600.0


def test_an_event_behind_others_ends_the_wait(workspace: Path) -> None:
    with DeviceEvents(about_null) as events:
        for _ in range(2):
            for path in (ZERO, ZERO, ZERO, NULL):
                path.write_text("change")
            assert events.wait(5.0)


def test_unrelated_events_do_not_end_the_wait(workspace: Path) -> None:
    timer = threading.Timer(0.2, NULL.write_text, ["change"])
    with DeviceEvents(lambda event: concerns_us(event, Config())) as events:
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
        self.state = folder / "installed"
        self.start()

    def start(self, env: dict[str, str] | None = None) -> None:
        """Run gpuhook watch."""
        words = ["watch", "--interval=0.2", f"--config={self.config}"]
        words.append(f"--state-dir={self.state}")
        with self.log.open("wb") as log:
            environment = {**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})}
            argv = [str(self._installation.command), *words]
            self.process = subprocess.Popen(argv, stdout=log, stderr=log, env=environment)

    def simulate(self, *options: str) -> Driver:
        return simulate(self._installation, self._root, *options)

    def keep_documents(self) -> Path:
        """Install CDI specs for podman that the watch keeps up to date; return the GPUs' spec."""
        words = ["--cdi", "--engine=podman", f"--state-dir={self.state}"]
        env = {"GPUHOOK_CONFIG": str(self.config)}
        run([self._installation.command, "install", *words], env).ok()
        return cdi_folder() / "nvidia.com-gpu.yaml"  # the session has its own /run and /etc

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the watch during the block, so that it sees all changes only at the end."""
        wait_until(self._pauses, "it has stopped between two looks")
        yield
        self.process.send_signal(signal.SIGCONT)

    def _pauses(self) -> bool:
        """Stop the watch; if this interrupts a check, resume it and return False."""
        self.process.send_signal(signal.SIGSTOP)
        folder = Path(f"/proc/{self.process.pid}")
        stat = folder / "stat"
        wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "it has stopped")
        # proc_pid_syscall(5): the file shows the call that the process was stopped in.
        if (folder / "syscall").read_text().split()[0] in SELECT:
            return True
        self.process.send_signal(signal.SIGCONT)
        return False

    def last_error(self) -> float:
        """Return the time when CDI specs last couldn't be refreshed, in seconds since 1970."""
        return max((error.time for error in last_errors(str(self.state))), default=0.0)

    def gpuhook(self, *words: str) -> Result:
        return run([self._installation.command, *words, f"--config={self.config}"])

    def saved(self) -> str:
        """Return the doctor's message on the saved inventory, which the doctor never renews."""
        words = ["--format=json", f"--config={self.config}"]
        done = run([self._installation.command, "doctor", *words])
        findings = json.loads(done.stdout)["findings"]
        [message] = [each["message"] for each in findings if each["check"] == "saved-inventory"]
        return str(message)

    def wait_for(self, words: str) -> None:
        """Wait until the watch has printed the words."""
        wait_until(lambda: words in self.log.read_text(), f"{words!r} is printed")


@pytest.fixture
def watched(workspace: Path, installation: Installation) -> Iterator[Watched]:
    folder = workspace / "watched"
    folder.mkdir()
    watch = Watched(installation, folder)
    yield watch
    if watch.process.poll() is None:
        stop(watch.process)
    run(["rm", "-rf", folder]).ok()


def test_a_changed_driver_is_saved_before_a_container_start(watched: Watched) -> None:
    watched.wait_for("1 GPUs, 0 MIG devices")
    watched.simulate("--gpus=3")
    watched.wait_for("3 GPUs, 0 MIG devices")
    assert "3 GPUs, 0 MIG devices" in watched.saved()
    watched.simulate("--gpus=3", "--model=H100", "--mig=0:1g.10gb,1g.10gb")
    watched.wait_for("3 GPUs, 2 MIG devices")
    assert "3 GPUs, 2 MIG devices" in watched.saved()


def names(document: Path) -> set[str]:
    """Return the device names of a CDI spec as engines know them, or none if it doesn't exist."""
    devices = folders.read_folders([str(document.parent)]).devices
    return {
        name.partition("=")[2]
        for name in devices
        if not name.partition("=")[2].startswith(("GPU-", "MIG-"))
    }


def test_cdi_specs_are_written_and_removed_with_the_driver(watched: Watched) -> None:
    document = watched.keep_documents()
    try:
        assert names(document) == {"0", "all"}
        watched.simulate("--gpus=3")
        wait_until(lambda: names(document) == {"0", "1", "2", "all"}, "it has three GPUs")
        watched.wait_for(f"wrote {document}")
        watched.simulate("--fail=not-loaded")
        wait_until(lambda: not document.exists(), "it is gone")
        watched.wait_for(f"removed {document}")
        watched.simulate("--gpus=1", "--model=H100", "--mig=0:1g.10gb")
        wait_until(lambda: names(document) == {"0:0", "all"}, "it has the MIG device")
    finally:
        run(["rm", "-rf", document.parent]).ok()


def test_cdi_specs_are_updated_when_another_command_saved_first(watched: Watched) -> None:
    """The other command has saved the inventory, so it is fresh when the watch checks it."""
    watched.wait_for("1 GPUs")
    document = watched.keep_documents()
    try:
        with watched.paused():
            watched.simulate("--gpus=2")
            watched.gpuhook("refresh").ok()
        wait_until(lambda: names(document) == {"0", "1", "all"}, "it has two GPUs")
        watched.wait_for("2 GPUs")
    finally:
        run(["rm", "-rf", document.parent]).ok()


def test_a_cdi_spec_that_cannot_be_written_is_tried_again(watched: Watched) -> None:
    watched.wait_for("1 GPUs")
    document = watched.keep_documents()
    try:
        document.unlink()
        document.mkdir()
        with watched.paused():
            watched.simulate("--gpus=2")
        watched.wait_for("isn't a file of gpuhook")
        with watched.paused():
            watched.simulate("--gpus=3")
        watched.wait_for("3 GPUs")
        now = time.time()
        wait_until(lambda: watched.last_error() > now, "it was tried once more")
        document.rmdir()
        wait_until(lambda: names(document) == {"0", "1", "2", "all"}, "it is there")
        assert watched.log.read_text().count("isn't a file of gpuhook") == 1
    finally:
        run(["rm", "-rf", document.parent]).ok()


def test_cdi_specs_exist_when_the_watch_reports_readiness(
    watched: Watched, workspace: Path
) -> None:
    """systemd starts engines once the watch is ready."""
    document = watched.keep_documents()
    stop(watched.process)
    document.unlink()
    address = f"\0gpuhook-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        notify.bind(address)
        notify.settimeout(60)
        watched.start({"NOTIFY_SOCKET": address.replace("\0", "@")})
        try:
            assert notify.recv(100) == b"READY=1"
            assert names(document) == {"0", "all"}
        finally:
            run(["rm", "-rf", document.parent]).ok()


def test_a_missing_driver_is_logged_once(watched: Watched) -> None:
    watched.wait_for("1 GPUs")
    watched.simulate("--fail=not-loaded")
    watched.wait_for("Driver Not Loaded")
    time.sleep(1.0)
    assert watched.log.read_text().count("Driver Not Loaded") == 1
    watched.simulate("--gpus=2")
    watched.wait_for("2 GPUs")


def test_watch_replaces_a_killed_prefork_server_and_ends_it_at_exit(watched: Watched) -> None:
    watched.wait_for("1 GPUs")
    folder = Path(f"/run/gpuhook/launcher{watched.config}/ready")

    def standing() -> set[int]:
        """Return the pids of running prefork servers.

        A watch that was killed earlier leaves a name behind.
        """
        names = [path.name for path in folder.glob("[0-9]*")]
        return {int(name) for name in names if Path("/proc", name).exists()}

    wait_until(lambda: bool(standing()), "a prefork server runs")
    [first] = standing()
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: bool(standing() - {first}), "another does")
    [second] = standing() - {first}
    stop(watched.process)
    wait_until(lambda: not Path(f"/proc/{second}").exists(), "it ends with the watch")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_termination_signal_ends_watch_with_status_0(
    watched: Watched, number: signal.Signals
) -> None:
    watched.wait_for("1 GPUs")
    watched.process.send_signal(number)
    assert watched.process.wait(10.0) == 0

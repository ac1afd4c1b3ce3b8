"""Messages of a watch: each failing driver is reported once, an absent one isn't."""

import errno
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from timeouts import in_time

from gpuhook.base.config.loader import loads
from gpuhook.base.config.model import Config
from gpuhook.base.errors import DriverError, WatchError
from gpuhook.base.state_directory import StateDirectory
from gpuhook.core import contract
from gpuhook.core.inventory.model import Inventory
from gpuhook.prefork import instance
from gpuhook.tools import watch
from gpuhook.tools.cli.watch import watch as command
from gpuhook.tools.watch import HostWatcher
from gpuhook.vendors import registry

BROKEN = "is there, and broken"
EVERY = pytest.mark.parametrize("names", registry.BUILT_IN.values(), ids=registry.BUILT_IN)


class Machine:
    """A machine without any driver, and the messages of its watch."""

    def __init__(self, folder: Path) -> None:
        root = folder / "driver"
        root.mkdir()
        self._text = (
            f'[nvidia-container-cli]\nroot = "{root}"\nload-kmods = false\n'
            f'[gpuhook]\nroot = "{root}"\nstate-dir = "{folder}/state"\n'
        )
        self._said: list[str] = []
        self.declare("")

    def declare(self, table: str) -> None:
        """Watch the machine with a configuration that also has this table."""
        self.config = loads(self._text + table)
        self._watch = HostWatcher(self.config, "gpu-py", self._said.append, lambda: True)

    def look(self) -> list[str]:
        """Refresh the watch; return its new messages."""
        self._said.clear()
        self._watch.refresh()
        return [*self._said]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def answer(
    monkeypatch: pytest.MonkeyPatch, names: ModuleType, inventory: Inventory | None = None
) -> None:
    """Make a vendor's driver return this inventory, or fail without one."""

    def discover(_vendor: contract.Vendor, _config: Config) -> Inventory:
        if inventory is None:
            raise DriverError(f"{names.TITLE}'s driver {BROKEN}", "Repair it")
        return inventory

    monkeypatch.setattr(type(contract.load(names)), "discover", discover)
    monkeypatch.setattr(type(contract.load(names)), "inventory", Inventory)


class Always:
    """Events that come without a pause."""

    def __init__(self) -> None:
        self._file = os.open("/dev/zero", os.O_RDONLY)

    def fileno(self) -> int:
        return self._file

    def close(self) -> None:
        os.close(self._file)

    def read(self) -> list[dict[str, str]]:
        return [{"DEVPATH": "/module/nvidia"}]


@pytest.mark.protects(
    "events-end",
    "endless device events don't stop gpuhook watch from checking the devices",
    instead="came, end = True, now + _SETTLE",
)
def test_endless_events_do_not_delay_the_device_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that is loaded again and again causes endless events."""
    events = watch.DeviceEvents.__new__(watch.DeviceEvents)
    events._concerns, events._events = (lambda _: True), Always()  # type: ignore[assignment]
    monkeypatch.setattr(watch, "_LONGEST", 0.02)
    try:
        with in_time():
            assert events.wait(60.0)
    finally:
        events._events.close()


def test_watch_does_not_load_pyroute2() -> None:
    """pyroute2 would need more memory than all the rest of the program."""
    code = "import sys, gpuhook.tools.cli.watch; print(*sys.modules)"
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60)
    loaded = done.stdout.split()
    assert "gpuhook.tools.watch" in loaded
    assert "pyroute2" not in loaded


def test_a_machine_without_drivers_causes_one_message(machine: Machine) -> None:
    [said] = machine.look()
    assert "NVIDIA" in said
    assert machine.look() == []


@EVERY
@pytest.mark.parametrize("later", [False, True])
def test_a_broken_driver_is_reported_once(
    machine: Machine, names: ModuleType, monkeypatch: pytest.MonkeyPatch, later: bool
) -> None:
    if later:
        assert len(machine.look()) == 1
    answer(monkeypatch, names)
    [said] = machine.look()
    assert said.startswith(f"{names.TITLE}'s driver {BROKEN}")
    assert machine.look() == []


@EVERY
def test_a_removed_driver_is_reported_once(
    machine: Machine, names: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as there:
        inventory = Inventory(names.NAME, "/", "1.0", (), ())
        answer(there, names, inventory)
        assert machine.look() == [inventory.sentence()]
        assert machine.look() == []
    for saved in Path(machine.config.state_dir).iterdir():
        saved.unlink()
    with pytest.raises(DriverError) as gone:
        contract.load(names).discover(machine.config)
    assert machine.look() == [str(gone.value)]
    assert machine.look() == []


def test_a_device_that_reappears_unchanged_is_reported(tmp_path: Path) -> None:
    """The inventory saved when the device was first present is valid again."""
    bus = tmp_path / "driver/sys/bus/pci/devices"
    machine = Machine(tmp_path)
    table = '[[gpuhook.vendors]]\nname = "maker"\nkind = "maker.example/card"\n'
    table += 'variable = "MAKER_VISIBLE_DEVICES"\nnodes = ["/dev/maker{n}"]\n'
    table += 'present = "pci:1ca4"\n'
    machine.declare(table)
    assert "NVIDIA" in "".join(machine.look())
    for _ in range(2):
        (bus / "0000:01:00.0").mkdir(parents=True)
        (bus / "0000:01:00.0/vendor").write_text("0x1ca4\n")
        assert machine.look() == ["maker: driver unknown, 0 devices"]
        assert machine.look() == []
        (bus / "0000:01:00.0/vendor").unlink()
        (bus / "0000:01:00.0").rmdir()
        [gone] = machine.look()
        assert gone.startswith("Maker's driver isn't loaded")


def test_all_broken_drivers_are_named(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    for names in registry.BUILT_IN.values():
        answer(monkeypatch, names)
    assert len(machine.look()) == len(registry.BUILT_IN)


def test_an_error_common_to_all_vendors_is_reported_once(machine: Machine) -> None:
    Path(machine.config.state_dir).write_text("no folder")
    assert len(machine.look()) == 1


# The prefork server ------------------------------------------------------------------


def no_process() -> int:
    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))


def descriptors() -> list[str]:
    return sorted(os.listdir("/proc/self/fd"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the prefork servers, in place of the configured one."""
    monkeypatch.setattr(instance, "open_folder", lambda _: StateDirectory.opened(str(tmp_path)))
    return tmp_path


def test_a_prefork_server_that_cannot_start_is_reported_once_and_retried(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watch continues, and keeps no descriptors open until the next attempt."""
    said: list[str] = []
    watch = HostWatcher(loads(""), "/bin/true", said.append, lambda: True)
    before = descriptors()
    for _ in range(2):
        with monkeypatch.context() as full:
            full.setattr(os, "fork", no_process)
            for _ in range(3):
                watch.stand()
        assert descriptors() == before
        assert [each.partition(":")[0] for each in said] == ["The prefork server can't be started"]
        said.clear()
        watch.stand()
        assert watch._standing is not None
        os.waitid(os.P_PID, watch._standing, os.WEXITED | os.WNOWAIT)
    assert descriptors() == before


def test_a_refused_second_prefork_server_leaves_no_descriptors(folder: Path) -> None:
    lock = instance._lock_instance(loads(""), "/bin/true")
    assert lock is not None
    before = descriptors()
    for _ in range(3):
        assert instance.start(loads(""), "/bin/true") is None
    assert descriptors() == before
    os.close(lock)


def test_only_listener_failures_are_reported_as_event_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors of the watch itself are raised unchanged."""

    def fail(*_: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "full")

    monkeypatch.setattr(HostWatcher, "run", fail)
    monkeypatch.setattr("gpuhook.tools.cli.watch.signal.signal", lambda *_: None)
    monkeypatch.setattr("gpuhook.tools.cli.watch.our_program", lambda _: "/bin/true")
    words = ["--state-dir", str(tmp_path)]
    with pytest.raises(BlockingIOError):
        command.main(words, standalone_mode=False)
    monkeypatch.setattr("gpuhook.tools.watch.listen", fail)
    with pytest.raises(WatchError, match="events can't be listened to: full"):
        command.main(words, standalone_mode=False)

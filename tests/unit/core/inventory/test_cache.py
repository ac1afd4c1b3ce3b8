"""The saved inventory: found while nothing changed, made again otherwise."""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuhook.base.cgroup import answers
from gpuhook.base.config.model import Config
from gpuhook.base.errors import DriverError, NoDriverError
from gpuhook.core.inventory import cache, fingerprint, model
from gpuhook.core.inventory.model import DeviceNode, DriverFile
from gpuhook.vendors.nvidia import discover
from gpuhook.vendors.nvidia.model import NvidiaInventory
from gpuhook.vendors.nvidia.vendor import VENDOR

ICD = "usr/share/vulkan/icd.d/nvidia_icd.json"


class Machine:
    """A driver root made of plain files, with a count of how often it was searched."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "root"
        self.looks = 0
        self.lost: tuple[int, ...] = ()
        self.failure: DriverError | None = None
        self.meanwhile: Callable[[], None] = lambda: None
        self.config = Config()
        self.config.driver_root = str(self.root)
        self.config.state_dir = str(folder / "state")
        self.write("proc/driver/nvidia/version", "NVRM version: 580.65.06\n")
        self.write("proc/driver/nvidia/gpus/0000:1b:00.0/information", "")
        self.write("proc/driver/nvidia/capabilities/gpu0/mig/gi7/ci0/access", "")
        self.write("etc/ld.so.cache", "cache")
        self.write("usr/lib/libcuda.so.580.65.06", "")
        self.write("dev/nvidia-caps/nvidia-cap1", "")
        self.write(ICD, "{}")
        self.write("opt/bin/other", "")

    def write(self, path: str, text: str) -> None:
        full = self.root / path
        full.parent.mkdir(parents=True, exist_ok=True)
        full.write_text(text)

    def look(self, config: Config) -> NvidiaInventory:
        self.looks += 1
        version = f"look {self.looks}"
        self.meanwhile()
        if self.failure is not None:
            raise self.failure
        every = (
            DriverFile("library", "/usr/lib/libcuda.so.580.65.06", "libcuda.so", "compute"),
            DriverFile("manifest", f"/{ICD}", f"/{ICD}", "graphics", content="{}"),
        )
        files = tuple(each for each in every if (self.root / each.path.lstrip("/")).exists())
        return NvidiaInventory(str(self.root), version, "13.0", (), (), files, self.lost)

    def get(self) -> str:
        return cache.get_inventory(self.config, VENDOR).version

    @property
    def file(self) -> Path:
        [path] = (Path(self.config.state_dir)).glob("inventory-nvidia-????????????????")
        return path


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(tmp_path)
    monkeypatch.setattr(discover, "discover", made.look)
    return made


def remove(library: Path) -> None:
    library.unlink()


def remove_folder(library: Path) -> None:
    library.unlink()
    library.parent.rmdir()


def exchange_folder(library: Path) -> None:
    library.parent.rename(library.parent.with_name("old"))
    library.parent.mkdir()


def link_to_nothing(library: Path) -> None:
    library.parent.rename(library.parent.with_name("old"))
    library.parent.symlink_to("nowhere")


@pytest.fixture
def noted(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> cache.LoadedInventory:
    """An inventory whose folders were noted some time after their files were made."""
    machine.get()
    loaded = cache.load(machine.config, VENDOR)
    assert loaded is not None
    now = time.time() + 60
    monkeypatch.setattr(time, "time", lambda: now)
    loaded.note_folders()
    return loaded


@pytest.mark.parametrize("change", [remove, remove_folder, exchange_folder, link_to_nothing])
def test_a_removed_or_replaced_file_is_detected_by_its_folder(
    change: Callable[[Path], None], machine: Machine, noted: cache.LoadedInventory
) -> None:
    assert noted.is_same(machine.config)
    change(machine.root / "usr/lib/libcuda.so.580.65.06")
    assert not noted.is_same(machine.config)


def test_files_in_a_recorded_folder_are_not_checked_one_by_one(
    machine: Machine, noted: cache.LoadedInventory, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[str] = []
    real = fingerprint.missing

    def missing(root: str, paths: list[str]) -> list[str]:
        looked.extend(paths)
        return real(root, paths)

    monkeypatch.setattr(fingerprint, "missing", missing)
    assert noted.is_same(machine.config)
    assert not [path for path in looked if path.startswith("/usr/lib/")]
    (machine.root / "usr/lib/another").touch()  # a file that isn't the driver's
    assert noted.is_same(machine.config)
    assert [path for path in looked if path.startswith("/usr/lib/")]


@pytest.mark.protects(
    "just-changed",
    "a folder that has just changed isn't trusted to show that its files are unchanged",
    instead="settled = True",
)
def test_a_just_changed_folder_does_not_vouch_for_its_files(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A deletion within the same clock tick leaves the folder's times unchanged."""
    machine.get()
    loaded = cache.load(machine.config, VENDOR)
    assert loaded is not None
    folder = machine.root / "usr/lib"
    before = folder.stat()
    monkeypatch.setattr(time, "time", lambda: before.st_ctime + 1.0)
    loaded.note_folders()
    (folder / "libcuda.so.580.65.06").unlink()
    os.utime(folder, ns=(before.st_atime_ns, before.st_mtime_ns))
    loaded._folders_seen = [fingerprint.identity(path) for path in loaded._folders]
    assert not loaded.is_same(machine.config)


@pytest.mark.parametrize("days", [20, -20])
def test_an_inventory_with_a_lost_device_expires(
    days: int, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds even if the clock was set back in the meantime."""
    machine.lost = (3,)
    assert machine.get() == machine.get() == "look 1"
    now = time.time() + days * 86400
    monkeypatch.setattr(time, "time", lambda: now)
    assert machine.get() == "look 2"


def test_an_unchanged_machine_is_searched_once(machine: Machine) -> None:
    assert [machine.get() for _ in range(3)] == ["look 1"] * 3
    assert machine.looks == 1
    assert cache.saved(machine.config, VENDOR) == machine_inventory(machine)


def machine_inventory(machine: Machine) -> model.Inventory:
    return cache.get_inventory(machine.config, VENDOR)


CHANGES = {
    "driver version": lambda m: m.write("proc/driver/nvidia/version", "NVRM version: 590.1\n"),
    "a GPU more": lambda m: m.write("proc/driver/nvidia/gpus/0000:2b:00.0/information", ""),
    "a GPU less": lambda m: (m.root / "proc/driver/nvidia/gpus/0000:1b:00.0").rename(m.root / "x"),
    "a MIG device more": lambda m: m.write(
        "proc/driver/nvidia/capabilities/gpu0/mig/gi9/access", ""
    ),
    "a MIG device less": lambda m: (
        m.root / "proc/driver/nvidia/capabilities/gpu0/mig/gi7/ci0"
    ).rename(m.root / "x"),
    "a MIG instance made again": lambda m: (
        (m.root / "proc/driver/nvidia/capabilities/gpu0/mig/gi7").rename(m.root / "x"),
        m.write("proc/driver/nvidia/capabilities/gpu0/mig/gi7/ci0/access", ""),
    ),
    "ld.so.cache": lambda m: m.write("etc/ld.so.cache", "another cache"),
    "a new node": lambda m: m.write("dev/nvidia-uvm", ""),
    "a new capability node": lambda m: m.write("dev/nvidia-caps/nvidia-cap2", ""),
    "a file gone": lambda m: (m.root / "usr/lib/libcuda.so.580.65.06").unlink(),
    "a program installed": lambda m: m.write("usr/bin/nvidia-cuda-mps-server", ""),
    "a program elsewhere": lambda m: m.write("opt/bin/nvidia-smi", ""),
    "a folder of a distribution": lambda m: m.write("run/opengl-driver/bin/nvidia-smi", ""),
    "a tree of programs": lambda m: m.write("usr/libexec/nvidia/r580/bin/nvidia-smi", ""),
    "a manifest more": lambda m: m.write("usr/share/vulkan/icd.d/other.json", "{}"),
    "a manifest of another kind": lambda m: m.write("etc/OpenCL/vendors/nvidia.icd", "x"),
    "a manifest less": lambda m: (m.root / ICD).unlink(),
    "a manifest changed in place": lambda m: m.write(ICD, "{ }"),
    "a manifest replaced": lambda m: (
        m.write("usr/share/x", "[]"),
        (m.root / "usr/share/x").rename(m.root / ICD),
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_changed_machine_is_searched_again(
    machine: Machine, change: Callable[[Machine], object]
) -> None:
    assert machine.get() == "look 1"
    change(machine)
    assert cache.saved(machine.config, VENDOR) is None
    assert [machine.get(), machine.get()] == ["look 2"] * 2


@pytest.mark.parametrize("path", ["run/nvidia-persistenced/socket", "tmp/nvidia-mps"])
def test_daemon_sockets_and_mps_folders_leave_the_inventory_current(
    machine: Machine, path: str
) -> None:
    assert machine.get() == "look 1"
    machine.write(path, "")
    assert machine.get() == "look 1"
    (machine.root / path).unlink()
    assert machine.get() == "look 1"
    assert machine.looks == 1


@pytest.mark.parametrize("folder", ["srv/bin", "srv/share/vulkan/icd.d"])
def test_changes_in_configured_folders_cause_a_new_search(machine: Machine, folder: str) -> None:
    machine.config.binary_search_paths = ("/srv/bin",)
    machine.config.data_search_paths = ("/srv/share",)
    machine.write("srv/other", "")
    assert machine.get() == "look 1"
    machine.write(f"{folder}/nvidia-smi", "")
    assert [machine.get(), machine.get()] == ["look 2"] * 2
    machine.config.data_search_paths = ()
    assert machine.get() == "look 3"


def test_changes_in_world_writable_folders_leave_the_inventory_current(machine: Machine) -> None:
    for folder in ("usr/share/vulkan/icd.d", "opt/bin"):
        (machine.root / folder).chmod(0o777)
    assert machine.get() == "look 1"
    machine.write("opt/bin/nvidia-smi", "")
    machine.write("usr/share/vulkan/icd.d/other.json", "")
    assert machine.get() == "look 1"


def test_missing_paths_in_world_writable_folders_are_not_watched(tmp_path: Path) -> None:
    for folder in ("tmp", "usr"):
        (tmp_path / folder).mkdir()
    (tmp_path / "tmp").chmod(0o1777)
    paths = ["/tmp/x", "/tmp/x/y", "/usr/x", "/usr/x/y", "/x"]
    assert fingerprint.settled(str(tmp_path), paths) == ["/usr/x", "/usr/x/y", "/x"]
    assert fingerprint.settled(f"{tmp_path}/nowhere", paths) == []


def test_a_changed_device_node_is_detected() -> None:
    good = DeviceNode.of("/dev/null", os.stat("/dev/null"))
    assert good is not None
    fields = {name: getattr(good, name) for name in good.fields()}
    assert fingerprint.same_nodes("/", [good], ())
    for name in ("major", "minor", "mode", "uid", "gid"):
        other = DeviceNode(**{**fields, name: fields[name] + 1})
        assert not fingerprint.same_nodes("/", [other], ())
        assert fingerprint.same_nodes("/", [other], ("/dev",))
    assert not fingerprint.same_nodes("/", [good, DeviceNode("/dev/nothing", 1, 99)], ())


def test_two_configurations_have_separate_inventories(machine: Machine) -> None:
    other = Config()
    other.driver_root, other.state_dir = machine.config.driver_root, machine.config.state_dir
    other.user = "video"
    for _ in range(2):
        assert cache.get_inventory(machine.config, VENDOR).version == "look 1"
        assert cache.get_inventory(other, VENDOR).version == "look 2"


def test_a_device_search_reads_only_known_settings() -> None:
    asked = set()

    class Spy(Config):
        def __getattribute__(self, name: str) -> object:
            asked.add(name)
            return super().__getattribute__(name)

    config = Spy()
    config.driver_root = "/nonexistent"
    asked.clear()
    with pytest.raises(DriverError):
        discover.discover(config)
    root = {"driver_root_of", "own_driver_root", "driver_root", "driver_roots", "root"}
    error = {"file", "path"}
    assert asked <= {*VENDOR.settings, *root, *error, "nvml_timeout"}


@pytest.mark.parametrize("path", ["/srv/gpuhook.toml", None])
def test_a_driver_root_error_names_the_setting_and_its_file(
    path: str | None, tmp_path: Path
) -> None:
    config = Config(path)
    config.user = str(os.getuid())
    for root in (tmp_path / "nothing", tmp_path):
        config.driver_root = str(root)
        with pytest.raises(DriverError) as caught:
            discover.discover(config)
        assert "[nvidia-container-cli] root" in caught.value.remedy
        assert caught.value.remedy.endswith(f" in {path or '/etc/gpuhook/config.toml'}")


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.booleans(), st.integers(0, 1 << 16), st.integers(1, 255))
def test_a_damaged_inventory_file_is_ignored_and_remade(
    machine: Machine, cut: bool, at: int, flipped: int
) -> None:
    before = machine.get()
    content = bytearray(machine.file.read_bytes())
    at %= len(content)
    content[at] ^= flipped
    if cut:
        del content[at:]
    machine.file.write_bytes(bytes(content))
    assert cache.saved(machine.config, VENDOR) is None
    assert machine.get() != before


@pytest.mark.parametrize("mode", [0o666, 0o664, 0o602])
def test_an_inventory_file_writable_by_others_is_replaced(machine: Machine, mode: int) -> None:
    machine.get()
    machine.file.chmod(mode)
    assert machine.get() == "look 2"
    assert machine.file.stat().st_mode & 0o777 == 0o644


def test_a_state_folder_writable_by_others_is_not_used(machine: Machine) -> None:
    machine.get()
    Path(machine.config.state_dir).chmod(0o777)
    assert [machine.get(), machine.get()] == ["look 2", "look 3"]
    with pytest.raises(DriverError, match="can't be used"):
        cache.refresh(machine.config, VENDOR)


def test_links_replacing_the_state_folder_or_file_are_not_followed(machine: Machine) -> None:
    machine.get()
    file, folder = machine.file, Path(machine.config.state_dir)
    file.rename(folder / "elsewhere")
    file.symlink_to(folder / "elsewhere")
    assert machine.get() == "look 2"
    assert not file.is_symlink()
    folder.rename(folder.with_name("moved"))
    folder.symlink_to(folder.with_name("moved"))
    assert [machine.get(), machine.get()] == ["look 3", "look 4"]


def test_without_a_state_folder_the_inventory_is_made_each_time(machine: Machine) -> None:
    Path(machine.config.state_dir).write_text("a file in the way")
    assert [machine.get(), machine.get()] == ["look 1", "look 2"]


def test_an_inventory_read_without_saving_leaves_no_files(machine: Machine) -> None:
    assert cache.get_inventory(machine.config, VENDOR, save=False).version == "look 1"
    assert not Path(machine.config.state_dir).exists()


def test_a_change_during_the_search_causes_another_search(machine: Machine) -> None:
    def change() -> None:
        if machine.looks == 1:
            machine.write("proc/driver/nvidia/version", "NVRM version: 590.1\n")

    machine.meanwhile = change
    assert [machine.get(), machine.get()] == ["look 2"] * 2


class Held:
    """A first search that lasts until the test lets it finish, while other threads ask."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._begun, self._go_on = threading.Event(), threading.Event()
        self._threads: list[threading.Thread] = []
        self.seen: list[object] = []
        machine.meanwhile = self._wait
        self.ask(1)
        assert self._begun.wait(10)

    def _wait(self) -> None:
        if not self._begun.is_set():
            self._begun.set()
            assert self._go_on.wait(10)

    def _get(self) -> None:
        try:
            self.seen.append(self._machine.get())
        except DriverError as error:
            self.seen.append((str(error), type(error)))

    def ask(self, count: int) -> None:
        made = [threading.Thread(target=self._get) for _ in range(count)]
        self._threads += made
        for thread in made:
            thread.start()

    def end(self) -> None:
        self._go_on.set()
        for thread in self._threads:
            thread.join(10)


def test_concurrent_callers_share_one_device_search(machine: Machine) -> None:
    held = Held(machine)
    held.ask(7)
    held.end()
    assert held.seen == ["look 1"] * 8


@pytest.mark.parametrize("kind", [DriverError, NoDriverError])
def test_concurrent_callers_share_the_failure_of_one_search(
    machine: Machine, kind: type[DriverError]
) -> None:
    machine.failure = kind("NVML failed: no luck", "Try a restart")
    held = Held(machine)
    held.ask(4)
    while len(list(Path("/proc/self/task").iterdir())) < 6:
        pass
    held.end()
    assert held.seen == [("NVML failed: no luck. Try a restart.", kind)] * 5
    assert machine.looks < 5
    machine.failure, looks = None, machine.looks
    assert machine.get() == f"look {looks + 1}"


def test_a_waiter_that_times_out_searches_for_devices_itself(machine: Machine) -> None:
    machine.config.nvml_timeout = -cache._SPARE + 0.05
    held = Held(machine)
    assert machine.get() == "look 2"
    held.end()
    assert machine.get() == "look 1"


@pytest.mark.protects(
    "part-unsaved",
    "an inventory read while a cgroup denies devices isn't saved as the machine's",
    instead="if False:",
)
@pytest.mark.parametrize("node", ["nvidia7", "nvidia-caps/nvidia-cap1"])
def test_a_process_denied_a_device_saves_no_inventory(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, node: str
) -> None:
    """In a Slurm job, NVML shows only the job's GPUs, and numbers them differently."""
    machine.write("dev/nvidia7", "")
    away = str(machine.root / "dev" / node)
    monkeypatch.setattr(answers, "is_withheld", lambda path: path == away)
    assert [machine.get(), machine.get()] == ["look 1", "look 2"]
    with pytest.raises(DriverError, match=f"nothing was saved, as a device cgroup .*{node}"):
        cache.refresh(machine.config, VENDOR)
    assert cache.follow(machine.config, VENDOR).inventory.version == "look 4"
    away = ""
    assert [machine.get(), machine.get()] == ["look 5", "look 5"]
    away = str(machine.root / "dev" / node)
    assert machine.get() == "look 5"


def test_a_failure_in_a_process_denied_a_device_is_not_shared(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.write("dev/nvidia7", "")
    monkeypatch.setattr(answers, "is_withheld", lambda path: path.endswith("nvidia7"))
    machine.failure = DriverError("NVML shows no GPU", "Ask for one")
    with pytest.raises(DriverError, match="NVML shows no GPU"):
        machine.get()
    for lock in Path(machine.config.state_dir).glob("*nvidia*.lock"):
        assert lock.read_text() == ""


def test_refresh_searches_for_devices_even_if_nothing_changed(machine: Machine) -> None:
    assert machine.get() == "look 1"
    assert cache.refresh(machine.config, VENDOR).version == "look 2"
    assert machine.get() == "look 2"


@pytest.mark.parametrize("can_save", [True, False])
def test_follow_searches_again_only_after_a_change_or_on_demand(
    machine: Machine, can_save: bool
) -> None:
    if not can_save:
        Path(machine.config.state_dir).write_text("a file in the way")
    found = cache.follow(machine.config, VENDOR)
    assert found.inventory.version == "look 1"
    assert cache.follow(machine.config, VENDOR, found) is found
    assert (cache.saved(machine.config, VENDOR) is not None) is can_save
    machine.write("etc/ld.so.cache", "another cache")
    found = cache.follow(machine.config, VENDOR, found)
    assert found.inventory.version == "look 2"
    assert cache.follow(machine.config, VENDOR, found) is found
    assert cache.follow(machine.config, VENDOR, found, ask=True).inventory.version == "look 3"

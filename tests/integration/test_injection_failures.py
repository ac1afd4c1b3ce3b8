"""Injections in which any call may fail, and which then leave container and host unchanged."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness.sandbox import Sandbox, Volume, contents, in_child, sandbox, see_drivers
from harness.snapshot import mount_table

from gpuhook import inject as injection
from gpuhook.base.container import kernel
from gpuhook.base.container.changes import Journal
from gpuhook.base.errors import InjectError
from gpuhook.core.inventory.model import DeviceNode
from gpuhook.core.plan.operations import (
    FILE_OPTIONS,
    BindDevice,
    BindFile,
    Operation,
    Plan,
    Symlink,
    UpdateLdCache,
    WriteFile,
)
from gpuhook.vendors.nvidia.own_files import MaskProc

# Every function of the seam that changes something, or returns an object that is then used
# to change something.
CHANGING = (
    "attach_mount",
    "change_owner",
    "clone_tree",
    "create_file",
    "create_folder",
    "create_link",
    "detach_mount",
    "enter_mount_namespace",
    "give",
    "new_tmpfs",
    "remove_file",
    "rename",
    "set_label",
    "set_mode",
    "set_mount_attributes",
    "write",
)
LIBRARIES = "/usr/lib/x86_64-linux-gnu"
GPU = "gpus/0000:1b:00.0/information"
MIG = "capabilities/gpu0/mig/gi1/access"


class Recorder:
    """A wrapper of the kernel calls that counts them and makes one of them fail."""

    def __init__(self, failing: int) -> None:
        self._failing = failing
        self.calls: list[str] = []

    def wrap(self) -> None:
        """Start to record, in a process that sees a driver."""
        see_drivers("nvidia")
        for name in CHANGING:
            setattr(kernel, name, self._wrapped(name, getattr(kernel, name)))

    def _wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            self.calls.append(name)
            if len(self.calls) == self._failing:
                raise OSError(errno.EIO, "made to fail", name)
            return real(*args, **options)

        return call


def without_undoing() -> None:
    Journal.record = lambda self, undo: None  # type: ignore[method-assign]


def write(path: Path, data: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(data)


@pytest.fixture
def driver(tmp_path: Path, workspace: Path) -> Path:
    root = tmp_path / "driver"
    for name in ("libcuda.so.1.2.3", "libnvidia-ml.so.1.2.3", "libnew.so.1.2.3"):
        write(root / "usr/lib" / name, name)
    write(root / "proc/driver/nvidia/params", "ModifyDeviceFiles: 1\n")
    write(root / "proc/driver/nvidia/version", "1.2.3\n")
    write(root / "proc/driver/nvidia" / GPU, "GPU\n")
    write(root / "proc/driver/nvidia" / MIG, "DeviceFileMinor: 3\n")
    (root / "dev").mkdir()
    os.mknod(root / "dev/nvidia0", 0o20666, os.makedev(195, 0))
    return root


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """A root with everything that an injection restores: links, files, a mount point, a cache."""
    root = tmp_path / "rootfs"
    libraries = root / LIBRARIES.lstrip("/")
    for folder in ("dev", "etc", "proc/driver/nvidia/gpus/0000:ff:00.0"):
        (root / folder).mkdir(parents=True)
    write(libraries / "libcuda.so.1.2.3", "an earlier placeholder")
    write(libraries / "libnvidia-ml.so.1", "a file where a link has to be")
    (libraries / "libcuda.so.1").symlink_to("libcuda.so.0.9")
    write(root / "etc/profile.json", "the image's own")
    (root / "etc/ld.so.cache").symlink_to("../var/cache/elsewhere")
    return root


def plan(driver: Path) -> list[Operation]:
    source = str(driver)
    binds = [
        BindFile(source, f"/usr/lib/{name}", f"{folder}/{name}", FILE_OPTIONS, "test")
        for name, folder in (
            ("libcuda.so.1.2.3", LIBRARIES),
            ("libnvidia-ml.so.1.2.3", LIBRARIES),
            ("libnew.so.1.2.3", "/opt/not/there/yet"),
        )
    ]
    return [
        MaskProc(source, ("params", "version", "registry"), (GPU, MIG), "test"),
        *binds,
        BindDevice(source, DeviceNode("/dev/nvidia0", 195, 0), "test"),
        Symlink(f"{LIBRARIES}/libcuda.so.1", "libcuda.so.1.2.3", replace=True, reason="stale"),
        Symlink(f"{LIBRARIES}/libnvidia-ml.so.1", "libnvidia-ml.so.1.2.3", replace=True, reason=""),
        Symlink(f"{LIBRARIES}/libcuda.so", "libcuda.so.1", replace=False, reason="new"),
        WriteFile("/etc/profile.json", "ours", 0o644, "over the image's"),
        WriteFile("/etc/new.conf", "ours", 0o600, "new"),
        UpdateLdCache((("libcuda.so.1", f"{LIBRARIES}/libcuda.so.1", 0x303),), "test"),
    ]


def state(box: Sandbox) -> tuple[Any, ...]:
    return (
        mount_table(),
        mount_table(box.mounts()),
        contents(box.root),
        contents(box.inside("/dev")),
    )


def failure(
    box: Sandbox, operations: list[Operation], driver: Path, failing: int
) -> InjectError | None:
    """Return the error of an injection whose call ``failing`` fails, or None without that call."""
    try:
        box.inject(operations, Recorder(failing).wrap)
    except InjectError as error:
        return error
    return None


def fail_each_call(box: Sandbox, operations: list[Operation], driver: Path) -> int:
    """Make the 1st, 2nd, ... call fail until no call is left; return the number of calls."""
    before = state(box)
    failing = 1
    while error := failure(box, operations, driver, failing):
        assert "made to fail" in error.cause or "can't be entered" in error.cause
        assert "left behind" not in error.remedy
        assert state(box) == before, f"call {failing} left something: {error}"
        failing += 1
    return failing - 1


def test_a_failure_of_every_call_is_undone(driver: Path, image: Path) -> None:
    with sandbox(image) as box:
        count = fail_each_call(box, plan(driver), driver)
        assert count > 60, "fewer calls than the plan has steps: are they still recorded?"
        # The loop ends when no call fails, so the last injection is complete.
        assert b"\0" in contents(image)["etc/ld.so.cache"][-1]
        inside = contents(box.inside(LIBRARIES))
        assert inside["libcuda.so.1.2.3"][-1] == b"libcuda.so.1.2.3"
        assert inside["libnvidia-ml.so.1"][-1] == b"libnvidia-ml.so.1.2.3"
        assert inside["libcuda.so.1"][-1] == b"libcuda.so.1.2.3"


def test_a_failure_of_every_call_is_undone_while_a_volume_is_covered(
    driver: Path, image: Path, tmp_path: Path
) -> None:
    volume = tmp_path / "etc-of-the-host"
    write(volume / "ld.so.cache", "")
    write(volume / "profile.json", "the host's")
    operations = [step for step in plan(driver) if "new.conf" not in step.describe()]
    before = contents(volume)
    with sandbox(image, [Volume(volume, "/etc")]) as box:
        (volume / "ld.so.cache").unlink()
        write(volume / "ld.so.cache", "")
        fail_each_call(box, operations, driver)
        assert box.inside("/etc/profile.json").read_text() == "ours"
        assert b"libcuda.so.1" in box.inside("/etc/ld.so.cache").read_bytes()
    assert contents(volume) == before


def test_without_the_journal_a_failure_leaves_changes(driver: Path, image: Path) -> None:
    with sandbox(image) as box:
        before = state(box)

        def prepare() -> None:
            without_undoing()
            Recorder(60).wrap()

        with pytest.raises(InjectError):
            box.inject(plan(driver), prepare)
        assert state(box) != before


def recorded(box: Sandbox, driver: Path) -> list[str]:
    """Inject in this process; return the names of the calls in order."""
    recorder = Recorder(0)
    recorder.wrap()
    with injection.open_container(box.pid, str(box.root)) as container:
        injection.inject(Plan(plan(driver)), container)
    return recorder.calls


def test_sources_are_cloned_first_and_the_cache_is_changed_last(driver: Path, image: Path) -> None:
    """Sources are cloned on the host, with their flags; the cache is the last to change."""
    with sandbox(image) as box:
        calls = in_child(lambda: recorded(box, driver))
    entered = calls.index("enter_mount_namespace")
    before, after = calls[:entered], calls[entered + 1 :]
    assert "attach_mount" not in before
    assert "create_folder" not in before
    assert before.count("clone_tree") == 6  # three libraries, a node, /proc of a GPU and a MIG
    assert before.count("set_mount_attributes") == before.count("clone_tree")
    assert after.count("clone_tree") == 1  # it covers a file of the image that has a SONAME
    assert after.count("attach_mount") == before.count("clone_tree") + 2  # the covered file, /proc
    assert calls[-1] == "rename"
    assert "detach_mount" not in calls

"""Flags that the kernel is asked to set on mounts in a container.

The numbers are those of include/uapi/linux/mount.h.
"""

import os
import socket
import stat
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from gpuhook.base.container import changes, kernel
from gpuhook.core.inventory.model import DeviceNode
from gpuhook.core.plan.operations import (
    FILE_OPTIONS,
    SOCKET_OPTIONS,
    BindDevice,
    BindFile,
    BindSocket,
    Operation,
    attributes_of,
)

READ_ONLY, NO_SUID, NO_DEVICES, NO_PROGRAMS = 1, 2, 4, 8
OPEN_TREE, MOUNT_SETATTR = 428, 442  # include/uapi/asm-generic/unistd.h


class Host:
    """A root folder that treats every file as owned by root."""

    def open_own(self, path: str) -> int:
        return os.open(path, os.O_PATH | os.O_CLOEXEC)

    open_socket = open = open_own


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The arguments of clone mounts to the kernel: flags to set and clear, and propagation."""
    found: list[tuple[int, ...]] = []
    clones: set[int] = set()

    def syscall(number: int, fd: int, *args: object, path: str = "") -> int:
        if number == OPEN_TREE:
            clones.add(os.dup(fd))
            return max(clones)
        assert (number, fd in clones) == (MOUNT_SETATTR, True), path
        attr = args[2]
        assert isinstance(attr, bytes)
        found.append(struct.unpack("=QQQQ", attr)[:3])
        return 0

    monkeypatch.setattr(kernel, "syscall", syscall)
    return found


def a_file(folder: Path) -> Operation:
    path = folder / "libcuda.so.1"
    path.touch()
    return BindFile("/", str(path), "/usr/lib/libcuda.so.1", FILE_OPTIONS, "")


def a_folder(folder: Path) -> Operation:
    (folder / "firmware").mkdir()
    return BindFile("/", str(folder / "firmware"), "/lib/firmware/x", FILE_OPTIONS, "")


def a_socket(folder: Path) -> Operation:
    path = str(folder / "socket")
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path)
    return BindSocket("/", path, path, SOCKET_OPTIONS, "")


def a_node(_: Path) -> Operation:
    status = os.stat("/dev/null")
    assert stat.S_ISCHR(status.st_mode)
    numbers = os.major(status.st_rdev), os.minor(status.st_rdev)
    return BindDevice("/", DeviceNode("/dev/null", *numbers, 0o666), "")


@pytest.mark.protects(
    "mount-flags",
    "every mount has the flags, such as nosuid, that keep it from raising privileges",
    instead="attributes = attributes_of(self.options) & ~kernel.MOUNT_ATTR_NOSUID",
)
@pytest.mark.parametrize(
    ("make", "given", "cleared"),
    [
        (a_file, READ_ONLY | NO_SUID | NO_DEVICES, 0),
        (a_folder, READ_ONLY | NO_SUID | NO_DEVICES, 0),
        (a_socket, NO_SUID | NO_DEVICES | NO_PROGRAMS, 0),
        (a_node, READ_ONLY | NO_SUID | NO_PROGRAMS, NO_DEVICES),
    ],
)
def test_every_mount_is_nosuid_and_only_device_nodes_allow_devices(
    make: Callable[[Path], Operation],
    given: int,
    cleared: int,
    told: list[tuple[int, ...]],
    tmp_path: Path,
) -> None:
    step = make(tmp_path)
    step.prepare(Host())  # type: ignore[arg-type]
    step.close()
    assert told == [(given, cleared, kernel.MS_PRIVATE)]


@pytest.mark.protects(
    "mount-flags",
    "every mount has the flags, such as nosuid, that keep it from raising privileges",
    instead="attributes = attributes_of(self.options) & ~kernel.MOUNT_ATTR_NOSUID",
)
def test_each_mount_option_maps_to_its_kernel_flag() -> None:
    options = {"ro": READ_ONLY, "nosuid": NO_SUID, "nodev": NO_DEVICES, "noexec": NO_PROGRAMS}
    assert {name: attributes_of((name,)) for name in options} == options
    assert attributes_of(tuple(options)) == 15


@pytest.mark.protects(
    "mount-flags",
    "every mount has the flags, such as nosuid, that keep it from raising privileges",
    instead="attributes = attributes_of(self.options) & ~kernel.MOUNT_ATTR_NOSUID",
)
def test_covers_of_image_files_are_read_only_nosuid_and_nodev() -> None:
    assert changes._COVER_ATTRIBUTES == READ_ONLY | NO_SUID | NO_DEVICES

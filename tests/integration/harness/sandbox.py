"""A container without a runtime: a process in a mount namespace like the one runc prepares.

It is for tests that run hundreds of times, or stop at a moment where no runtime can be
stopped.
"""

import ctypes
import os
import pickle
import signal
import stat
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from gpuhook import inject as injection
from gpuhook.base.container import kernel
from gpuhook.core.plan.operations import Operation, Plan

T = TypeVar("T")

CLONE_NEWNS = 0x00020000  # linux/sched.h
MS_RDONLY, MS_NODEV, MS_BIND, MS_REC = 1, 4, 4096, 16384  # linux/mount.h
MS_REMOUNT = 32
MS_PRIVATE, MS_SLAVE, MS_SHARED = 1 << 18, 1 << 19, 1 << 20

_libc = ctypes.CDLL(None, use_errno=True)


def mount(source: str | Path, target: str | Path, kind: str, flags: int, data: str = "") -> None:
    """Call mount(2)."""
    words = [str(word).encode() for word in (source, target, kind)]
    if _libc.mount(*words, ctypes.c_ulong(flags), data.encode() or None) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(target))


def unshare_mounts() -> None:
    """Give this process a mount namespace of its own."""
    if _libc.unshare(CLONE_NEWNS) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), "unshare(CLONE_NEWNS)")


def see_drivers(*names: str) -> None:
    """Show this process folders in /proc/driver, as if drivers' modules were loaded."""
    unshare_mounts()
    mount("", "/proc", "", MS_PRIVATE)
    mount("tmpfs", "/proc/driver", "tmpfs", 0)
    for name in names:
        Path("/proc/driver", name).mkdir()


def in_child(function: Callable[[], T]) -> T:
    """Run a function in a forked process; return its result or raise its exception."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reader)
            _report(writer, function)
        finally:
            os._exit(1)  # the child must not continue as a second pytest
    os.close(writer)
    with open(reader, "rb") as pipe:
        data = pipe.read()
    os.waitpid(pid, 0)
    assert data, "the child ended without a word"
    worked, value = pickle.loads(data)  # noqa: S301 - our own child wrote it
    if worked:
        result: T = value
        return result
    error, text = value
    error.add_note(text)
    raise error


def _report(writer: int, function: Callable[[], Any]) -> NoReturn:
    try:
        answer: tuple[bool, Any] = (True, function())
    except BaseException as error:  # noqa: BLE001 - handed on to the parent
        answer = (False, (error, traceback.format_exc()))
    os.write(writer, pickle.dumps(answer))
    os._exit(0)


@dataclass(frozen=True)
class Volume:
    """A folder or file of the host that is mounted at a path in the container.

    Shared means that its propagation is the host's. Sandboxes see this only if the propagation
    of their root is shared, too.
    """

    source: Path
    destination: str
    propagation: int = MS_PRIVATE


@dataclass(frozen=True)
class Sandbox:
    """A container that is being created: its first process and its root."""

    pid: int
    root: Path

    def inject(
        self,
        operations: Sequence[Operation],
        before: Callable[[], None] = lambda: None,
    ) -> list[str]:
        """Execute operations as the hook does; return the skipped ones.

        ``before`` is called first, in the process that executes the operations.
        """

        def work() -> list[str]:
            before()
            with injection.open_container(self.pid, str(self.root)) as container:
                injection.inject(Plan(list(operations)), container)
                return container.skipped

        return in_child(work)

    def inside(self, path: str) -> Path:
        """Return the path at which this process finds a path of the container."""
        return Path(f"/proc/{self.pid}/root{self.root}{path}")

    def read(self, path: str) -> str:
        """Return the content that a program in the container reads from a file."""

        def work() -> str:
            fd = os.open(f"/proc/{self.pid}/ns/mnt", os.O_RDONLY)
            kernel.enter_mount_namespace(fd, path)
            os.chroot(self.root)
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            with open(fd, encoding="utf-8", errors="replace") as file:
                return file.read()

        return in_child(work)

    def mounts(self) -> str:
        """Return the container's mount table."""
        return Path(f"/proc/{self.pid}/mountinfo").read_text()


@contextmanager
def sandbox(
    root: Path,
    volumes: Sequence[Volume] = (),
    propagation: int = MS_SLAVE,
    prepare: Callable[[], None] = lambda: None,
) -> Iterator[Sandbox]:
    """Start a container's first process on a root, as runc does before its prestart hooks.

    ``propagation`` is rootfsPropagation in config.json. ``prepare`` is called in the process
    once its mounts exist.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reader)
            _be_container(root, volumes, propagation, prepare, writer)
        finally:
            os._exit(1)  # the child must not continue as a second pytest
    os.close(writer)
    try:
        with open(reader, "rb") as pipe:
            said = pipe.read()
        assert said == b"ready", said.decode()
        yield Sandbox(pid, root)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _be_container(
    root: Path,
    volumes: Sequence[Volume],
    propagation: int,
    prepare: Callable[[], None],
    writer: int,
) -> NoReturn:
    try:
        unshare_mounts()
        mount("", "/", "", propagation | MS_REC)
        mount(root, root, "", MS_BIND | MS_REC)
        mount("tmpfs", root / "dev", "tmpfs", 0, "mode=755")
        for volume in volumes:
            target = root / volume.destination.lstrip("/")
            mount(volume.source, target, "", MS_BIND | MS_REC)
            if volume.propagation != MS_SHARED:
                mount("", target, "", volume.propagation)
        prepare()
        os.write(writer, b"ready")
    except BaseException:  # noqa: BLE001 - handed on to the parent
        os.write(writer, traceback.format_exc().encode())
    os.close(writer)
    while True:
        signal.pause()


def contents(root: Path) -> dict[str, tuple[int, int, int, int, bytes]]:
    """Return mode, owner, device number and content of everything below a folder, by path."""
    found = {}
    for path in [root, *root.rglob("*")]:
        status = path.lstat()
        data = b""
        if stat.S_ISLNK(status.st_mode):
            data = os.fsencode(path.readlink())
        elif stat.S_ISREG(status.st_mode):
            data = path.read_bytes()
        owner = (status.st_uid, status.st_gid)
        found[str(path.relative_to(root))] = (status.st_mode, *owner, status.st_rdev, data)
    return found

"""Confined reading below a folder that a stranger controls: every path is walked inside it.

A ``Rootfs`` holds one O_PATH descriptor of a container's root (or of a driver root). Every
path is resolved below that descriptor, by openat2(RESOLVE_IN_ROOT) or component by
component without following anything, and the caller gets a descriptor to act on. No path
is ever resolved to a string and used later: that race is CVE-2024-0132, CVE-2025-23359 and
their relatives. ``changes`` adds what changes anything.
"""

import errno
import os
import stat

from gpuhook.container import kernel

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Final, Self

PATH_FLAGS: "Final" = os.O_PATH | os.O_CLOEXEC
RESOLVE: "Final" = kernel.RESOLVE_IN_ROOT | kernel.RESOLVE_NO_MAGICLINKS
_READ_FLAGS: "Final" = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_MAX_LINKS: "Final" = 40  # as the kernel's own limit, include/linux/namei.h
_CHUNK: "Final" = 1 << 16  # bytes; memory that is too much costs more than a second read
_ABSENT: "Final" = (
    errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES, errno.ENAMETOOLONG,
)  # fmt: skip


class Rootfs:
    """A root filesystem, reached through one descriptor.

    Where the kernel has no openat2 (before Linux 5.6), paths are walked component by
    component, which can't be misled either.
    """

    def __init__(self, path: str) -> None:
        """Open the root; OSError if it isn't a folder."""
        self._set_up(os.open(path, PATH_FLAGS | os.O_DIRECTORY), path)

    def _set_up(self, fd: int, path: str) -> None:
        self.path = path
        self._fd = fd
        self._folders: dict[str, int] = {}

    def __enter__(self) -> "Self":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: "TracebackType | None",
    ) -> None:
        self.close()

    def folder(self, path: str) -> int:
        """Return an O_PATH descriptor of an existing folder; it stays ours."""
        fd = self._folders.get(path)
        if fd is None:
            fd = self._folders[path] = self.open(path, os.O_PATH | os.O_DIRECTORY)
        return fd

    def close(self) -> None:
        """Close every descriptor held."""
        for fd in self._folders.values():
            os.close(fd)
        self._folders.clear()
        os.close(self._fd)

    def open(self, path: str, flags: int = os.O_PATH) -> int:
        """Return a descriptor of an existing path, links followed inside the root."""
        try:
            return kernel.openat2(self._fd, _relative(path), flags, RESOLVE)
        except OSError as error:
            if error.errno != errno.ENOSYS:
                raise
        parent, name = walk(self._fd, path, enter)
        try:
            return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
        finally:
            os.close(parent)

    def exists(self, path: str) -> bool:
        """Tell whether a path, links followed inside the root, exists."""
        return self.stat(path) is not None

    def stat(self, path: str) -> os.stat_result | None:
        """Return the status of a path, links followed inside the root, or None."""
        try:
            fd = self.open(path)
        except OSError as error:
            if error.errno in _ABSENT:
                return None
            raise
        try:
            return os.fstat(fd)
        finally:
            os.close(fd)

    def real_path(self, path: str) -> str:
        """Return the path inside the root with every link resolved.

        Only for roots that we trust (a driver root): the answer is a string, which in a
        container's root could be outdated the moment it is returned.
        """
        fd = self.open(path)
        try:
            base = os.readlink(f"/proc/self/fd/{self._fd}").rstrip("/")
            found = os.readlink(f"/proc/self/fd/{fd}")
        finally:
            os.close(fd)
        return found.removeprefix(base) or "/"

    def list_folder(self, path: str) -> list[str]:
        """Return the names in a folder, sorted; empty if there is no such folder."""
        try:
            fd = self.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            if error.errno in _ABSENT:
                return []
            raise
        try:
            return sorted(os.listdir(fd))
        finally:
            os.close(fd)

    def open_file(self, path: str) -> int | None:
        """Open a regular file for reading; None if there is none or it is something else.

        What it is is known before it is opened: to open a device node that an image has in
        a file's place can already do harm.
        """
        try:
            fd = self.open(path)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG):
                return None
            raise
        try:
            return reopen(fd) if stat.S_ISREG(os.fstat(fd).st_mode) else None
        finally:
            os.close(fd)

    def read_file(self, path: str, limit: int) -> bytes | None:
        """Return a regular file's bytes, or None if there is none.

        Raises OSError(EFBIG) when the file is longer than ``limit`` bytes.
        """
        fd = self.open_file(path)
        if fd is None:
            return None
        try:
            return read_all(fd, limit, path)
        finally:
            os.close(fd)


def walk(root: int, path: str, step: "Callable[[int, str], int]") -> tuple[int, str]:
    """Resolve a path below a root component by component, following links inside it.

    ``step(parent, name)`` opens a folder on the way. Returns a descriptor of the last
    folder, which the caller closes, and the last name, which may not exist but is no link.
    """
    waiting = _components(path)[::-1]
    stack = [os.dup(root)]
    links = 0
    try:
        while True:
            name = waiting.pop() if waiting else "."
            if name == "..":
                if len(stack) > 1:
                    os.close(stack.pop())
                continue
            target = read_link(stack[-1], name)
            if target is not None:
                links += 1
                if links > _MAX_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
                if target.startswith("/"):
                    while len(stack) > 1:
                        os.close(stack.pop())
                waiting.extend(_components(target)[::-1])
            elif not waiting:
                return os.dup(stack[-1]), name
            else:
                stack.append(step(stack[-1], name))
    finally:
        for fd in stack:
            os.close(fd)


def enter(parent: int, name: str) -> int:
    """Open a folder in a folder without following a link."""
    return os.open(name, PATH_FLAGS | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)


def reopen(fd: int) -> int:
    """Open for reading what an O_PATH descriptor points at."""
    return os.open(f"/proc/self/fd/{fd}", _READ_FLAGS)


def read_link(parent: int, name: str) -> str | None:
    """Return a link's content, or None where the name is missing or no link."""
    try:
        return os.readlink(name, dir_fd=parent)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.EINVAL):
            return None
        raise


def read_all(fd: int, limit: int, path: str) -> bytes:
    """Read a descriptor to its end; OSError(EFBIG) past ``limit`` bytes."""
    chunks = []
    size = 0
    while chunk := os.read(fd, _CHUNK):
        size += len(chunk)
        if size > limit:
            raise OSError(errno.EFBIG, f"more than {limit} bytes", path)
        chunks.append(chunk)
    return b"".join(chunks)


def _components(path: str) -> list[str]:
    return [name for name in path.split("/") if name not in ("", ".")]


def _relative(path: str) -> str:
    return path.lstrip("/") or "."

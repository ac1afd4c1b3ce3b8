"""Confined access below a folder that a stranger controls: every path is walked inside it.

A ``Rootfs`` holds one O_PATH descriptor of a container's root (or of a driver root). Every
path is resolved below that descriptor, by openat2(RESOLVE_IN_ROOT) or component by
component without following anything, and the caller gets a descriptor to act on. No path
is ever resolved to a string and used later: that race is CVE-2024-0132, CVE-2025-23359 and
their relatives.

Whatever is created is noted in a ``Journal``, so that a failed injection can take back
exactly what it made and nothing else.

Hot path: imports os, stat, errno and kernel.
"""

import errno
import os
import stat

from gpuhook import kernel
from gpuhook.errors import InjectError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Self

_PATH_FLAGS = os.O_PATH | os.O_CLOEXEC
_READ_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_RESOLVE = kernel.RESOLVE_IN_ROOT | kernel.RESOLVE_NO_MAGICLINKS
_MAX_LINKS = 40  # as the kernel's own limit, include/linux/namei.h


class Journal:
    """What was done so far, as the calls that undo it."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def record(self, undo: "Callable[[], None]") -> None:
        """Remember how to take back the step that was just done."""
        self._undo.append(undo)

    def roll_back(self) -> list[str]:
        """Undo every step, last first; return what could not be undone, in words."""
        failures = []
        while self._undo:
            undo = self._undo.pop()
            try:
                undo()
            except OSError as error:
                failures.append(str(error))
        return failures


class Rootfs:
    """A container's root filesystem (or a driver root), reached through one descriptor.

    ``owner`` is (uid, gid) on the host for everything created below it: the container's
    root user where the container has a user namespace.
    """

    def __init__(self, path: str, journal: Journal, owner: tuple[int, int] = (0, 0)) -> None:
        """Open the root; OSError if it isn't a folder."""
        self._set_up(os.open(path, _PATH_FLAGS | os.O_DIRECTORY), path, journal, owner)

    def _set_up(self, fd: int, path: str, journal: Journal, owner: tuple[int, int]) -> None:
        self.path = path
        self._journal = journal
        self._owner = owner
        self._fd = fd
        self._folders: dict[str, int] = {}

    @classmethod
    def of_descriptor(cls, fd: int, path: str) -> "Self":
        """Return the root that a folder's descriptor (which is duplicated) points at."""
        root = cls.__new__(cls)
        root._set_up(os.dup(fd), path, Journal(), (0, 0))  # noqa: SLF001 - a constructor
        return root

    def __enter__(self) -> "Self":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: "TracebackType | None",
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close every descriptor held; the journal must not be rolled back after this."""
        for fd in self._folders.values():
            os.close(fd)
        self._folders.clear()
        os.close(self._fd)

    # Looking -----------------------------------------------------------------------------

    def open(self, path: str) -> int:
        """Return an O_PATH descriptor of an existing path, links followed inside the root."""
        return kernel.openat2(self._fd, _relative(path), os.O_PATH, _RESOLVE)

    def exists(self, path: str) -> bool:
        """Tell whether a path, links followed inside the root, exists."""
        return self.stat(path) is not None

    def stat(self, path: str) -> os.stat_result | None:
        """Return the status of a path, links followed inside the root, or None."""
        try:
            fd = self.open(path)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES):
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
            flags = os.O_RDONLY | os.O_DIRECTORY
            fd = kernel.openat2(self._fd, _relative(path), flags, _RESOLVE)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES):
                return []
            raise
        try:
            return sorted(os.listdir(fd))
        finally:
            os.close(fd)

    def open_file(self, path: str) -> int | None:
        """Open a regular file for reading; None if there is none or it is something else."""
        try:
            fd = kernel.openat2(self._fd, _relative(path), _READ_FLAGS, _RESOLVE)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO):
                return None
            raise
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            return None
        return fd

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

    # Changing ----------------------------------------------------------------------------

    def folder(self, path: str) -> int:
        """Return a descriptor of a folder, made where it is missing; it stays ours."""
        fd = self._folders.get(path)
        if fd is None:
            fd = self._folders[path] = self._open_folder(path)
        return fd

    def _open_folder(self, path: str) -> int:
        try:
            return kernel.openat2(self._fd, _relative(path), os.O_PATH | os.O_DIRECTORY, _RESOLVE)
        except FileNotFoundError:
            pass
        parent, name = self._final_place(path)
        try:
            return self._enter_or_make(parent, name)
        finally:
            os.close(parent)

    def mount_point(self, path: str, *, folder: bool = False) -> int:
        """Return a descriptor to mount on: an empty file (or folder), made where missing.

        An existing file of any content is used as it is. A link in the image is followed
        inside the root. Raises InjectError where a folder is in the way of a file or the
        reverse.
        """
        parent_path, _, name = path.rpartition("/")
        parent = self.folder(parent_path or "/")
        try:
            fd = os.open(name, _PATH_FLAGS | os.O_NOFOLLOW, dir_fd=parent)
        except FileNotFoundError:
            return self._make_mount_point(parent, name, folder)
        mode = os.fstat(fd).st_mode
        if stat.S_ISLNK(mode):
            os.close(fd)
            return self._mount_point_behind_link(path, folder)
        if stat.S_ISDIR(mode) != folder:
            os.close(fd)
            raise _wrong_kind(path, folder)
        return fd

    def _mount_point_behind_link(self, path: str, folder: bool) -> int:
        parent, name = self._final_place(path)
        try:
            try:
                fd = os.open(name, _PATH_FLAGS | os.O_NOFOLLOW, dir_fd=parent)
            except FileNotFoundError:
                return self._make_mount_point(parent, name, folder)
            if stat.S_ISDIR(os.fstat(fd).st_mode) != folder:
                os.close(fd)
                raise _wrong_kind(path, folder)
            return fd
        finally:
            os.close(parent)

    def _make_mount_point(self, parent: int, name: str, folder: bool) -> int:
        if folder:
            return self._enter_or_make(parent, name)
        fd = kernel.create_file(parent, name, 0o644)
        self._adopt(fd, parent, name)
        return fd

    def make_link(self, path: str, target: str, *, replace: bool) -> None:
        """Make a symbolic link; an existing name is left alone.

        With ``replace``, an existing *link* is replaced when it points elsewhere (and put
        back by the journal).
        """
        parent_path, _, name = path.rpartition("/")
        parent = self.folder(parent_path or "/")
        try:
            kernel.create_link(parent, name, target)
        except FileExistsError:
            if replace:
                self._replace_link(parent, name, target)
            return
        self._own(parent, name)
        held = os.dup(parent)
        self._journal.record(lambda: _unlink_link(held, name, target))

    def _replace_link(self, parent: int, name: str, target: str) -> None:
        try:
            old = os.readlink(name, dir_fd=parent)
        except OSError:
            return  # not a link: a file of the image keeps its place
        if old == target:
            return
        temporary = f".{name}.gpuhook"
        _unlink_if_there(parent, temporary)
        kernel.create_link(parent, temporary, target)
        self._own(parent, temporary)
        kernel.rename(parent, temporary, name)
        held = os.dup(parent)

        def undo() -> None:
            kernel.create_link(held, temporary, old)
            kernel.rename(held, temporary, name)

        self._journal.record(undo)

    def replace_file(self, path: str, data: bytes, mode: int) -> None:
        """Write a file whole or not at all: a temporary file beside it, renamed over it.

        A link of that name is replaced, not followed.
        """
        parent_path, _, name = path.rpartition("/")
        parent = self.folder(parent_path or "/")
        temporary = f".{name}.gpuhook"
        _unlink_if_there(parent, temporary)
        fd = kernel.create_file(parent, temporary, 0o600)
        try:
            write_all(fd, data)
            os.fchmod(fd, mode)
            self._own(parent, temporary)
            kernel.rename(parent, temporary, name)
        except OSError:
            _unlink_if_there(parent, temporary)
            raise
        finally:
            os.close(fd)

    def remove_file(self, path: str) -> None:
        """Remove a file or link that we made."""
        parent_path, _, name = path.rpartition("/")
        kernel.remove_file(self.folder(parent_path or "/"), name)

    # Walking -----------------------------------------------------------------------------

    def _final_place(self, path: str) -> tuple[int, str]:
        """Return (descriptor of the parent folder, last name) with links followed inside.

        Missing folders on the way are made. The last name may or may not exist, but is not
        a link. The caller closes the descriptor.
        """
        waiting = _components(path)[::-1]
        stack = [os.dup(self._fd)]
        links = 0
        try:
            while True:
                name = waiting.pop() if waiting else "."
                if name == "..":
                    if len(stack) > 1:
                        os.close(stack.pop())
                    continue
                target = _read_link(stack[-1], name)
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
                    stack.append(self._enter_or_make(stack[-1], name))
        finally:
            for fd in stack:
                os.close(fd)

    def _enter_or_make(self, parent: int, name: str) -> int:
        flags = _PATH_FLAGS | os.O_DIRECTORY | os.O_NOFOLLOW
        try:
            return os.open(name, flags, dir_fd=parent)
        except FileNotFoundError:
            kernel.create_folder(parent, name)
        held = os.dup(parent)
        self._journal.record(lambda: kernel.remove_folder(held, name))
        fd = os.open(name, flags, dir_fd=parent)
        self._own(parent, name)
        return fd

    def _adopt(self, fd: int, parent: int, name: str) -> None:
        """Note a file just made, and give it to the container's root user."""
        made = os.fstat(fd)
        held = os.dup(parent)
        self._journal.record(lambda: _unlink_same(held, name, made))
        self._own(parent, name)

    def _own(self, parent: int, name: str) -> None:
        if self._owner != (0, 0):
            kernel.change_owner(parent, name, self._owner)


def read_all(fd: int, limit: int, path: str) -> bytes:
    """Read a descriptor to its end; OSError(EFBIG) past ``limit`` bytes."""
    chunks = []
    size = 0
    while chunk := os.read(fd, 1 << 20):
        size += len(chunk)
        if size > limit:
            raise OSError(errno.EFBIG, f"more than {limit} bytes", path)
        chunks.append(chunk)
    return b"".join(chunks)


def write_all(fd: int, data: bytes) -> None:
    """Write everything, however many calls it takes."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _components(path: str) -> list[str]:
    return [name for name in path.split("/") if name not in ("", ".")]


def _relative(path: str) -> str:
    return path.lstrip("/") or "."


def _read_link(parent: int, name: str) -> str | None:
    """Return a link's content, or None where the name is missing or no link."""
    try:
        return os.readlink(name, dir_fd=parent)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.EINVAL):
            return None
        raise


def _unlink_if_there(parent: int, name: str) -> None:
    try:
        kernel.remove_file(parent, name)
    except FileNotFoundError:
        pass


def _unlink_link(parent: int, name: str, target: str) -> None:
    if _read_link(parent, name) == target:
        kernel.remove_file(parent, name)


def _unlink_same(parent: int, name: str, made: os.stat_result) -> None:
    """Remove a file that we made, if the name still means that very file."""
    try:
        now = os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return
    if (now.st_dev, now.st_ino) == (made.st_dev, made.st_ino):
        kernel.remove_file(parent, name)


def _wrong_kind(path: str, folder: bool) -> InjectError:
    found, wanted = ("a file", "a folder") if folder else ("a folder", "a file")
    return InjectError(
        f"the image has {found} at {path}, where {wanted} has to be mounted",
        f"Remove {path} from the image",
    )

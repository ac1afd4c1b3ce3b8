"""Confined reading below an untrusted folder: every path is resolved inside it.

A ``Rootfs`` holds one O_PATH descriptor of a container's root (or of a driver root). Every
path is resolved below that descriptor, by openat2(RESOLVE_IN_ROOT) or component by
component without following anything, and the caller gets a descriptor to act on. No path
is ever resolved to a string and used later: that race is CVE-2024-0132, CVE-2025-23359 and
related ones. ``changes`` adds the operations that write.

In a driver root, files that are mounted into containers have to be *own*: only root owns and can
write to every folder on the path. A file or mount that another user has put there isn't even
examined, because its folder is refused first.
"""

import errno
import os
import stat

from gpuhook.base.container import kernel
from gpuhook.base.errors import UntrustedPathError
from gpuhook.base.fileio import read_start

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Final, Self

PATH_FLAGS: "Final" = os.O_PATH | os.O_CLOEXEC
RESOLVE: "Final" = kernel.RESOLVE_IN_ROOT | kernel.RESOLVE_NO_MAGICLINKS
_FOLDER_FLAGS: "Final" = PATH_FLAGS | os.O_DIRECTORY | os.O_NOFOLLOW
_READ_FLAGS: "Final" = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_MAX_LINKS: "Final" = 40  # the kernel's limit, include/linux/namei.h
_SYSTEM_USERS: "Final" = range(1, 1000)  # login.defs(5): those below UID_MIN
_MOST_LEVELS, _MOST_ENTRIES = 8, 20_000  # in a folder that is searched for sockets
_ABSENT: "Final" = (
    errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES, errno.ENAMETOOLONG,
)  # fmt: skip


class Rootfs:
    """A root filesystem, reached through one descriptor.

    Without openat2 (before Linux 5.6), paths are walked component by component, which is just as
    safe.
    """

    def __init__(self, path: str) -> None:
        """Open the root; OSError if it isn't a folder."""
        self._set_up(os.open(path, PATH_FLAGS | os.O_DIRECTORY), path)

    def _set_up(self, fd: int, path: str) -> None:
        self.path = path
        self._fd = fd
        self._folders: dict[str, int] = {}
        self._own: dict[str, int] = {}

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
        """Return an O_PATH descriptor of an existing folder; this object closes it."""
        fd = self._folders.get(path)
        if fd is None:
            fd = self._folders[path] = self.open(path, os.O_PATH | os.O_DIRECTORY)
        return fd

    def close(self) -> None:
        """Close every descriptor held."""
        for held in (self._folders, self._own):
            for fd in held.values():
                os.close(fd)
            held.clear()
        os.close(self._fd)

    def open(self, path: str, flags: int = os.O_PATH) -> int:
        """Return a descriptor of an existing path; links are followed inside the root."""
        try:
            return kernel.openat2(self._fd, _relative(path), flags, RESOLVE)
        except OSError as error:
            if error.errno != errno.ENOSYS:  # protects: no-openat2
                raise
        parent, name = walk(self._fd, path, enter)
        try:
            return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
        finally:
            os.close(parent)

    def open_own(self, path: str, *, writable: bool = False) -> int:
        """Return an O_PATH descriptor of a file that root has put at a path without links.

        UntrustedPathError if other users could have put it there, if it is a link or, unless
        ``writable``, a world-writable folder. OSError if it doesn't exist, or for a link in its
        parent path.
        """
        folder, _, name = path.rpartition("/")
        fd = os.open(name or ".", PATH_FLAGS | os.O_NOFOLLOW, dir_fd=self._own_folder(folder))
        mode = os.fstat(fd).st_mode
        everybodys = stat.S_ISDIR(mode) and mode & stat.S_IWOTH and not writable
        if stat.S_ISLNK(mode) or everybodys:  # protects: driver-link
            os.close(fd)
            problem = "it is a link now" if stat.S_ISLNK(mode) else "all users may write to it"
            raise _untrusted(self._outside(path), problem)
        return fd

    def open_socket(self, path: str) -> int:
        """Return an O_PATH descriptor of a socket that root or a daemon's system user owns.

        That user must own the socket's folder: daemons that don't run as root get such a folder.
        UntrustedPathError for anything else.
        """
        folder, _, name = path.rpartition("/")
        above, _, last = folder.rpartition("/")
        parent = os.open(last, _FOLDER_FLAGS, dir_fd=self._own_folder(above))
        try:
            daemon = _check_own(parent, self._outside(folder), _SYSTEM_USERS)
            fd = os.open(name, PATH_FLAGS | os.O_NOFOLLOW, dir_fd=parent)
        finally:
            os.close(parent)
        status = os.fstat(fd)
        # A second hard link may lead to another daemon's socket: this one's user could create it.
        alone = stat.S_ISSOCK(status.st_mode) and status.st_nlink == 1
        if alone and (status.st_uid == daemon or is_own(status.st_uid)):  # protects: whose-socket
            return fd
        os.close(fd)
        raise _untrusted(
            self._outside(path), "it isn't a socket that only root or its folder's owner owns"
        )

    def own_path(self, path: str) -> str:
        """Return the real path of a file; root's links are followed inside the root.

        UntrustedPathError as in ``open_own``, OSError if it doesn't exist. The result is valid for
        ``open_own``, also later.
        """
        self._own_folder("")
        parent, name = walk(self._fd, path, self._enter_own)
        try:
            os.stat(name, dir_fd=parent, follow_symlinks=False)
            folder = self._inside(parent).rstrip("/")
        finally:
            os.close(parent)
        return os.path.normpath(f"{folder}/{name}")

    def own_folder(self, path: str) -> str:
        """Return the real path of a folder that is root's, with all its parents (``own_path``).

        OSError also if it isn't a folder.
        """
        real = self.own_path(path)
        self._own_folder(real.rstrip("/"))
        return real

    def _outside(self, path: str) -> str:
        return self.path.rstrip("/") + path

    def _own_folder(self, path: str) -> int:
        """Return a descriptor of a folder that is root's, with all its parents; we close it."""
        fd = self._own.get(path)
        if fd is not None:
            return fd
        if path:
            above, _, name = path.rpartition("/")
            fd = os.open(name, _FOLDER_FLAGS, dir_fd=self._own_folder(above))
        else:
            fd = os.dup(self._fd)
        try:
            _check_own(fd, self._outside(path) or "/")
        except BaseException:
            os.close(fd)
            raise
        self._own[path] = fd
        return fd

    def _enter_own(self, parent: int, name: str) -> int:
        fd = enter(parent, name)
        try:
            _check_own(fd, name)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def exists(self, path: str) -> bool:
        """Tell whether a path exists; links are followed inside the root."""
        return self.stat(path) is not None

    def has_name(self, path: str) -> bool:
        """Tell whether a path exists, including dangling links."""
        folder, _, name = path.rpartition("/")
        try:
            os.stat(name, dir_fd=self.folder(folder or "/"), follow_symlinks=False)
        except OSError:
            return False
        return True

    def stat(self, path: str) -> os.stat_result | None:
        """Return the status of a path, or None; links are followed inside the root."""
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

        Only for trusted roots (a driver root): in a container's root, the resulting string could
        be outdated immediately.
        """
        fd = self.open(path)
        try:
            return self._inside(fd)
        finally:
            os.close(fd)

    def _inside(self, fd: int) -> str:
        """Return the path inside the root of a descriptor's file."""
        base = os.readlink(f"/proc/self/fd/{self._fd}").rstrip("/")
        return os.readlink(f"/proc/self/fd/{fd}").removeprefix(base) or "/"

    def is_leftover(self, path: str, target: str, *, renewed: bool) -> bool:
        """Tell whether a name is a leftover link to another version of the file at ``target``.

        That is an empty file, or a link to an empty or missing file whose name differs only in
        the version; with ``renewed``, to any such file.
        """
        folder, _, name = path.rpartition("/")
        try:
            link = read_link(self.folder(folder or "/"), name)
            found = self.stat(path)
        except OSError:
            return False
        if link is None:
            return found is not None and _is_empty(found)
        if _unversioned(self.leads_to(path)) != _unversioned(target):
            return False
        if found is None or _is_empty(found):
            return True
        if not renewed:
            return False
        ours = self.stat(os.path.join(folder, target))
        return ours is None or not os.path.samestat(ours, found)

    def leads_to(self, path: str) -> str:
        """Return the target of a link, followed inside the root, whether it exists or not.

        If a folder on the way is missing, returns the link's own content. Like ``real_path``, the
        result is a string: callers must resolve it again.
        """
        try:
            parent, name = walk(self._fd, path, enter)
        except OSError:
            folder, _, name = path.rpartition("/")
            link = read_link(self.folder(folder or "/"), name) or name
            return os.path.normpath(os.path.join(folder, link))
        try:
            return f"{self._inside(parent).rstrip('/')}/{name}"
        finally:
            os.close(parent)

    def list_folder(self, path: str, most: int = 0) -> list[str]:
        """Return the names in a folder, sorted; empty if there is no such folder.

        ``most`` limits their number, which is necessary for a folder of an image.
        """
        try:
            fd = self.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            if error.errno in _ABSENT:
                return []
            raise
        try:
            if most:
                with os.scandir(fd) as entries:
                    return sorted(
                        entry.name for _, entry in zip(range(most), entries, strict=False)
                    )
            return sorted(os.listdir(fd))
        finally:
            os.close(fd)

    def open_file(self, path: str) -> int | None:
        """Open a regular file for reading; None if there is none or it has another type.

        The type is checked before opening: opening a device node that an image has in a file's
        place can already do harm.
        """
        try:
            fd = self.open(path)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG):
                return None
            raise
        try:
            # protects: regular-file
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


class DriverRoots:
    """Driver roots, each opened once; a context manager."""

    def __init__(self) -> None:
        self._roots: dict[str, Rootfs] = {}

    def __enter__(self) -> "Self":
        return self

    def __exit__(self, *details: object) -> None:
        for root in self._roots.values():
            root.close()

    def of(self, path: str) -> Rootfs:
        """Return the root with that path; OSError if it doesn't exist."""
        found = self._roots.get(path)
        if found is None:
            found = self._roots[path] = Rootfs(path)
        return found


# Ownership -----------------------------------------------------------------------------------


def is_own(uid: int) -> bool:
    """Tell whether an owner is root, as far as that is visible, or this user."""
    if uid in (0, os.geteuid()):
        return True
    from gpuhook.base.host.files import is_roots  # noqa: PLC0415 - only in user namespaces

    return is_roots(uid)


def _check_own(fd: int, path: str, besides: range = range(0)) -> int:
    """Return a folder's owner: root, or one of ``besides``.

    UntrustedPathError for another owner, and for a world-writable folder. A group may have write
    access: that is the administrator's choice, as for /usr/local in Debian.
    """
    status = os.fstat(fd)
    if status.st_mode & stat.S_IWOTH:  # protects: everybodys-folder
        raise _untrusted(path, "all users may write to it")
    if status.st_uid not in besides and not is_own(status.st_uid):  # protects: strangers-folder
        raise _untrusted(path, f"it belongs to user {status.st_uid}")
    return status.st_uid


def _untrusted(path: str, problem: str) -> UntrustedPathError:
    return UntrustedPathError(
        f"No file from {path} is passed to containers: {problem}",
        "Keep files for containers in folders that only root can change",
    )


class SocketError(UntrustedPathError):
    """A mount would contain a socket, and so give containers access to its daemon."""


def refuse_socket(fd: int, path: str) -> None:
    """Close the descriptor and raise an error if it is a socket or a folder that has one."""
    mode = os.fstat(fd).st_mode
    socket = find_socket(fd) if stat.S_ISDIR(mode) else ""
    if socket or stat.S_ISSOCK(mode):  # protects: mounted-socket
        os.close(fd)
        why = f"it contains the socket {socket}" if socket else "it is a socket"
        raise SocketError(
            f"No file from {path} is passed to containers: {why}",
            "Name the files that containers need",
        )


def find_socket(fd: int, levels: int = _MOST_LEVELS) -> str:
    """Return the path of a socket in a folder, at any searched depth; "" for none.

    ``fd`` may be an O_PATH descriptor. No link is followed. The search covers at most ``levels``
    levels of folders and 20,000 entries; unreadable ones are skipped.
    """
    return _socket_in(fd, levels, [_MOST_ENTRIES])


def _socket_in(fd: int, levels: int, left: list[int]) -> str:
    try:
        here = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=fd)
    except OSError:
        return ""
    try:
        with os.scandir(here) as entries:
            for entry in entries:
                left[0] -= 1
                if left[0] < 0:
                    return ""
                if entry.is_dir(follow_symlinks=False):
                    if levels > 1 and (found := _socket_below(here, entry.name, levels - 1, left)):
                        return f"{entry.name}/{found}"
                elif _is_socket(entry):
                    return entry.name
    except OSError:
        return ""  # the folder was removed meanwhile
    finally:
        os.close(here)
    return ""


def _is_socket(entry: "os.DirEntry[str]") -> bool:
    if entry.is_file(follow_symlinks=False) or entry.is_symlink():
        return False
    return stat.S_ISSOCK(entry.stat(follow_symlinks=False).st_mode)


def _socket_below(parent: int, name: str, levels: int, left: list[int]) -> str:
    try:
        fd = enter(parent, name)
    except OSError:
        return ""
    try:
        return _socket_in(fd, levels, left)
    finally:
        os.close(fd)


# Walking -------------------------------------------------------------------------------------


def walk(root: int, path: str, step: "Callable[[int, str], int]") -> tuple[int, str]:
    """Resolve a path below a root component by component, following links inside it.

    ``step(parent, name)`` opens a folder on the path. Returns a descriptor of the last
    folder, which the caller closes, and the last name, which may not exist but isn't a link.
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
                if target.startswith("/"):  # protects: absolute-links
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
    """Open a folder in a folder; links aren't followed."""
    return os.open(name, PATH_FLAGS | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)


def reopen(fd: int) -> int:
    """Open the file of an O_PATH descriptor for reading."""
    return os.open(f"/proc/self/fd/{fd}", _READ_FLAGS)


def read_link(parent: int, name: str) -> str | None:
    """Return a link's content, or None if the name is missing or isn't a link."""
    try:
        return os.readlink(name, dir_fd=parent)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.EINVAL):
            return None
        raise


def read_all(fd: int, limit: int, path: str) -> bytes:
    """Read a descriptor to its end; OSError(EFBIG) for more than ``limit`` bytes."""
    data = read_start(fd, limit + 1)
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"more than {limit} bytes", path)
    return data


def _is_empty(status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode) and status.st_size == 0


def _unversioned(path: str) -> str:
    """Return a file's name without a library's version."""
    return path.rpartition("/")[2].partition(".so")[0]


def _components(path: str) -> list[str]:
    return [name for name in path.split("/") if name not in ("", ".")]


def _relative(path: str) -> str:
    return path.lstrip("/") or "."

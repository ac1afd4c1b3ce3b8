"""The state directory: folders and files that keep gpuhook's state between processes.

    STATE-DIR/                inventories, parsed CDI specs, the state of gpuhook mps
    STATE-DIR/containers/     records of containers and their exclusive devices
    STATE-DIR/devices/        the ledger of cluster services and gpuhook mps
    STATE-DIR/mps/claims/     reservations of MPS clients
    STATE-DIR/verdicts/       verdicts of the gate

STATE-DIR is ``state-dir`` of config.toml, by default /run/gpuhook. The folder of prefork servers,
below the launcher's cache, is opened here too. A folder counts only if no other non-root user can
have written to it, and everything in it is reached through its descriptor. Files are replaced
atomically, and locked by files that no other user can open. State of an earlier boot is
recognised by ``boot_id``.

Commands keep their own records of changes in /var/lib: ``tools.state_file``.

Imports nothing heavy, because every start with devices reads saved state.
"""

import _imp
import errno
import os
import stat
import time

from gpuhook.base import fileio
from gpuhook.base.oci import jsontext

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Self

BOOT_ID = "/proc/sys/kernel/random/boot_id"

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_LOCK = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_MODE = 0o755  # inventories are no secret: vendors' tools show them to every user
_PRIVATE = 0o700  # of folders in it, in which other users could else open locks
_WRITE, _ANY = 0o022, 0o077  # rights of other users
_MAX_BYTES = 64 << 20  # bytes of a file
_HASH_KEY = 0x67707568  # any number; the hash detects damage and isn't for secrecy


class StateDirectory:
    """An open folder of state, for a with block; ``path`` is for messages.

    Its methods take names in it, and raise OSError.
    """

    __slots__ = ("fd", "path")

    def __init__(self, fd: int, path: str) -> None:
        self.fd = fd
        self.path = path

    @classmethod
    def open(cls, path: str) -> "Self | None":
        """Open a state directory; None if there is no trustworthy one."""
        try:
            return cls.opened(path)
        except OSError:
            return None

    @classmethod
    def opened(cls, path: str) -> "Self":
        """Open a state directory; OSError if there is no trustworthy one."""
        return cls._open(path, None, path, _WRITE)

    @classmethod
    def make(cls, path: str, *, private: bool = False) -> "Self | None":
        """Create a state directory and open it; None if that fails or it can't be trusted."""
        mode = _PRIVATE if private else _MODE
        try:
            try:
                os.makedirs(os.path.dirname(path), exist_ok=True)
                os.mkdir(path, mode)
                os.chmod(path, mode)  # regardless of the umask
            except FileExistsError:
                pass  # just created by another process, or owned by another user: checked below
            return cls._open(path, None, path, _ANY if private else _WRITE)
        except OSError:
            return None

    @classmethod
    def _open(cls, name: str, parent: "int | None", path: str, others: int) -> "Self":
        fd = os.open(name, _FOLDER, dir_fd=parent)
        if is_ours(os.fstat(fd), others):
            return cls(fd, path)
        os.close(fd)
        raise PermissionError(errno.EPERM, "it belongs to another user, or others can use it", path)

    def folder(self, name: str, *, make: bool = False, private: bool = False) -> "Self":
        """Open a folder in it; with ``make``, create it if it is missing, for this user only.

        A ``private`` one counts only if other users can't read it either.
        """
        if make:
            try:
                os.mkdir(name, _PRIVATE, dir_fd=self.fd)
            except FileExistsError:
                pass
        return self._open(name, self.fd, f"{self.path}/{name}", _ANY if private else _WRITE)

    def __enter__(self) -> "Self":
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    def close(self) -> None:
        """Close its descriptor; may be called again."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    # Locks ------------------------------------------------------------------------------------

    def lock(self, name: str, seconds: float = 0.0, *, for_life: bool = False) -> "StateLock":
        """Take the lock of a file, which is created; TimeoutError if it stays with another process.

        Other users can't open the file, and so not lock it. With ``for_life`` the lock is this
        process's and not inherited (``lock.hold``).
        """
        from gpuhook.base.host import lock  # noqa: PLC0415 - most starts need no lock

        end = time.monotonic() + seconds
        while True:
            fd = os.open(name, _LOCK, 0o600, dir_fd=self.fd)  # protects: state-lock
            try:
                taken = lock.hold(fd) if for_life else lock.take(fd, end - time.monotonic())
                if taken and self._has(name, fd):
                    return StateLock(fd)
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)
            if not taken or time.monotonic() >= end:
                raise TimeoutError(errno.ETIMEDOUT, "another process has locked it", name)

    def _has(self, name: str, fd: int) -> bool:
        """Tell whether an open file still has its name: the last holder may have removed it."""
        try:
            found = os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(os.fstat(fd), found)

    # Files ------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Return the names of all files and folders, sorted."""
        return sorted(os.listdir(self.fd))

    def read(self, name: str, most: int = _MAX_BYTES) -> bytes:
        """Return a file's content; ValueError if it is larger, no file, or other users' too."""
        return self._read(name, most)[0]

    def _read(self, name: str, most: int) -> tuple[bytes, os.stat_result]:
        fd = os.open(name, _READ, dir_fd=self.fd)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or not is_ours(status) or status.st_size > most:
                raise ValueError(name)
            return os.read(fd, status.st_size + 1), status
        finally:
            os.close(fd)

    def load(self, name: str, most: int = _MAX_BYTES) -> "Any":
        """Return the JSON value in a file; ValueError if it is damaged."""
        return jsontext.loads(self.read(name, most).decode())

    def read_checked(self, name: str) -> tuple[str, os.stat_result] | None:
        """Return text and status of a file of ``write_checked``, None unless it is complete."""
        try:
            data, status = self._read(name, _MAX_BYTES)
            begin = data.find(b"\n") + 1
            body = memoryview(data)[begin:]  # no copy: it may be large
            if not begin or data[: begin - 1] != digest(body).encode():
                return None
            return str(body, "utf-8"), status
        except (OSError, ValueError):
            return None

    def replace(self, name: str, data: bytes, mode: int = 0o600, *, lasting: bool = False) -> None:
        """Write a file atomically; with ``lasting`` it survives a power loss."""
        finish = os.fsync if lasting else None
        fileio.replace(name, data, f".{name}", folder=self.fd, mode=mode, finish=finish)
        if lasting:
            os.fsync(self.fd)

    def write_checked(self, name: str, body: bytes, mode: int = 0o644) -> None:
        """Write a file with a digest of its content, which shows damage by concurrent writers."""
        self.replace(name, digest(body).encode() + b"\n" + body, mode)

    def remove(self, name: str) -> None:
        """Remove a file, if it exists and may be removed."""
        fileio.remove(name, self.fd)


class StateLock:
    """A lock that is held until the end of a with block, or until ``close``."""

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __enter__(self) -> "Self":
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the lock."""
        os.close(self.fd)


def is_ours(status: os.stat_result, others: int = _WRITE) -> bool:
    """Tell whether it is root's or this user's, and other users have none of these rights."""
    # protects: saved-owner
    return status.st_uid in (0, os.geteuid()) and not status.st_mode & others


def digest(data: "bytes | memoryview") -> str:
    """Return 16 hexadecimal digits, to detect damage and to make names."""
    return _imp.source_hash(_HASH_KEY, data).hex()


def boot_id() -> str:
    """Return the id of this boot: what an earlier one made is gone. Source: random(4)."""
    fd = os.open(BOOT_ID, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, 64).decode("ascii").strip()
    finally:
        os.close(fd)

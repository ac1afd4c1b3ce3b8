"""Removal of a user's folder by root, whatever the user has put, mounted or stacked in it.

Root follows no link and neither enters nor queries a filesystem that is mounted there: a user's
own (FUSE) may hang, or return anything. A mount is detached by a descriptor of its root, which
open(2) with O_PATH gets without asking its server. Subfolders are moved up into a folder of root
and removed there, so depth costs nothing, and no path leads to them any more.

Sources: openat2(2), umount2(2), unlink(2), rename(2).
"""

import contextlib
import errno
import os
import time
from collections.abc import Iterator

from gpuhook.base.container import kernel

BIN = ".removed"  # root's folder for files to be removed, next to the users' folders
# protects: users-mounts-not-entered
_OWN = kernel.RESOLVE_NO_XDEV | kernel.RESOLVE_NO_SYMLINKS | kernel.RESOLVE_NO_MAGICLINKS
_ITSELF = os.O_PATH | os.O_NOFOLLOW
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
# unlink(2): EISDIR on Linux, EPERM in POSIX.
_IS_FOLDER = errno.EISDIR, errno.EPERM


def open_folder(parent: int, name: str) -> int:
    """Return a descriptor of a folder itself, with nothing mounted on it and no link in its place.

    OSError otherwise: ENOENT, ENOTDIR (a link, too), EXDEV where something is mounted on it.
    """
    return kernel.openat2(parent, name, _FOLDER, _OWN)  # protects: users-folder-itself


def uncover(parent: int, name: str, end: float) -> None:
    """Detach all mounts on a name in an open folder, until a time of the clock.

    OSError if that fails, TimeoutError if there are too many.
    """
    while _is_covered(parent, name):
        _in_time(name, end)
        top = os.open(name, _ITSELF | os.O_CLOEXEC, dir_fd=parent)
        try:
            kernel.detach_mount(top)  # protects: users-mounts-detached
        finally:
            os.close(top)


def _is_covered(parent: int, name: str) -> bool:
    try:
        os.close(kernel.openat2(parent, name, _ITSELF, _OWN))
    except OSError as error:
        if error.errno == errno.EXDEV:
            return True
        raise
    return False


def _in_time(name: str, end: float) -> None:
    if time.monotonic() >= end:
        raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT), name)


class TrashFolder:
    """The folder in which users' folders are removed, below an open folder of root.

    Names that one process moves there start with its own prefix; the rest is from others, which ran
    out of time.
    """

    def __init__(self, parent: int) -> None:
        self._parent = parent
        with contextlib.suppress(FileExistsError):
            os.mkdir(BIN, 0o700, dir_fd=parent)
        self._fd = open_folder(parent, BIN)
        status = os.fstat(self._fd)
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            os.close(self._fd)
            raise PermissionError(errno.EPERM, "others may change it", BIN)
        self._word = os.urandom(8).hex()

    def close(self) -> None:
        """Close it; its contents stay there."""
        os.close(self._fd)

    def take(self, name: str, end: float) -> None:
        """Move the parent folder's entry of a name here; FileNotFoundError if there is none."""
        self._take(self._parent, name, self._word, end)

    def remove_taken(self, end: float) -> None:
        """Remove the moved entries; TimeoutError, or the error of one that can't be removed."""
        self._remove(end, others=False)

    def remove_others(self, end: float) -> None:
        """Remove what other processes have left; errors as above."""
        self._remove(end, others=True)

    def _remove(self, end: float, *, others: bool) -> None:
        while True:
            done, failure = 0, None
            for name in self._names(others=others):
                _in_time(name, end)
                try:
                    self._remove_one(name, end)
                except FileNotFoundError:  # another process removes it, too
                    done += 1
                except OSError as error:
                    failure = error
                else:
                    done += 1
            if failure is not None and not done:
                raise failure
            if not done:
                return

    def _names(self, *, others: bool) -> Iterator[str]:
        """Yield the entries; they may change meanwhile."""
        with os.scandir(self._fd) as entries:
            for each in entries:
                if each.name.startswith(self._word) is not others:
                    yield each.name

    def _remove_one(self, name: str, end: float) -> None:
        """Remove a file, or a folder after moving its subfolders up."""
        uncover(self._fd, name, end)
        try:
            os.unlink(name, dir_fd=self._fd)
        except OSError as error:
            if error.errno not in _IS_FOLDER:
                raise
        else:
            return
        folder = open_folder(self._fd, name)
        try:
            with os.scandir(folder) as entries:
                for each in entries:
                    _in_time(name, end)
                    with contextlib.suppress(FileNotFoundError):
                        self._empty(folder, each.name, name.partition(".")[0], end)
        finally:
            os.close(folder)
        os.rmdir(name, dir_fd=self._fd)

    def _empty(self, folder: int, name: str, word: str, end: float) -> None:
        """Remove a file of a user's folder, or move a subfolder up."""
        try:
            os.unlink(name, dir_fd=folder)
        except OSError as error:
            if error.errno == errno.EBUSY:  # something is mounted on a file
                uncover(folder, name, end)
                os.unlink(name, dir_fd=folder)
            elif error.errno in _IS_FOLDER:
                self._take(folder, name, word, end)
            else:
                raise

    def _take(self, folder: int, name: str, word: str, end: float) -> None:
        uncover(folder, name, end)
        new = f"{word}.{os.urandom(8).hex()}"
        os.rename(name, new, src_dir_fd=folder, dst_dir_fd=self._fd)

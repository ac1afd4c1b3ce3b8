"""Lines appended to a file of the caller, such as an fstab, in a root folder or next to it."""

import errno
import os
import stat

from gpuhook import inject
from gpuhook.base.fileio import write_all
from gpuhook.base.host import files as host_files
from gpuhook.hpc.rootfs.folder import Folder
from gpuhook.tools.root_folder import user_files

_NEW = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_LOOK = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_AGAIN = os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC


def append(path: str, text: str, rootfs: str) -> None:
    """Append text to a regular file with a single name, which may be new.

    OSError if that fails, and if the file is in a volume of the root folder; UntrustedPathError
    if another user could redirect the path.
    """
    path = os.path.abspath(path)  # protects: lines-dots
    inside = user_files.inside(path, rootfs)
    if inside is None:
        host_files.check_way(os.path.dirname(path))  # protects: lines-way
        parent = os.open(os.path.dirname(path), _FOLDER)
        _append(parent, path, text)
        return
    with inject.open_folder(rootfs, Folder) as folder:
        parent = folder.open(os.path.dirname(inside), _FOLDER)
        if not folder.is_own(parent):  # protects: lines-volume
            os.close(parent)
            raise OSError(errno.EXDEV, "it is in a volume of the folder", path)
        _append(parent, path, text)


def _append(parent: int, path: str, text: str) -> None:
    """Append text to a file of an open folder, and close the folder."""
    try:
        fd = _opened(parent, os.path.basename(path))
        try:
            write_all(fd, text.encode("utf-8", "surrogateescape"))
        finally:
            os.close(fd)
    finally:
        os.close(parent)


def _opened(parent: int, name: str) -> int:
    """Return a descriptor to append to a file, which is created if missing."""
    try:
        return os.open(name, _NEW, 0o644, dir_fd=parent)
    except FileExistsError:
        fd = os.open(name, _LOOK, dir_fd=parent)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:  # protects: lines-file
            raise OSError(errno.EINVAL, "it isn't a regular file with one name", name)
        return os.open(f"/proc/self/fd/{fd}", _AGAIN)
    finally:
        os.close(fd)

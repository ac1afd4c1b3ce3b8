"""Files named by the caller in addition to a root folder: the environment, and fstab lines.

A file in the folder is opened below its root like all others there: the folder's owner could
create a link to a file of the host. A file elsewhere is the caller's choice, but no other user
may redirect root's writes.
"""

import errno
import os
import stat

from gpuhook import inject
from gpuhook.ground.container.rootfs import Rootfs
from gpuhook.ground.fileio import write_all
from gpuhook.ground.host import files as host_files

_NEW = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_LOOK = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_AGAIN = os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC


def read(path: str, rootfs: str) -> bytes:
    """Return a file's content, b"" if it doesn't exist; OSError if it can't be read."""
    path = os.path.abspath(path)
    inside = _inside(path, rootfs)
    if inside is not None:
        with Rootfs(rootfs) as root:
            return root.read_file(inside, host_files.LIMIT) or b""  # protects: environ-confined
    return host_files.read(path) if os.path.lexists(path) else b""


def append(path: str, text: str, rootfs: str) -> None:
    """Append text to a regular file with a single name, which may be new.

    OSError if that fails, and if the file is in a volume of the root folder; UntrustedPathError
    if another user could redirect the path.
    """
    path = os.path.abspath(path)  # protects: lines-dots
    inside = _inside(path, rootfs)
    if inside is None:
        host_files.check_way(os.path.dirname(path))  # protects: lines-way
        parent = os.open(os.path.dirname(path), _FOLDER)
        _append(parent, path, text)
        return
    from gpuhook.tools.apply.folder import Folder  # noqa: PLC0415 - explain appends nothing

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


def _inside(path: str, rootfs: str) -> str | None:
    """Return the part of a path below a root folder, None if it isn't below.

    The path is absolute and without "..", which after a link of the owner would lead elsewhere.
    """
    try:
        root = os.stat(rootfs)
    except OSError:
        return None
    names = path.split("/")
    for number in range(1, len(names)):
        try:
            found = os.stat("/".join(names[:number]) or "/")
        except OSError:
            return None
        if os.path.samestat(found, root):
            return "/" + "/".join(names[number:])
    return None

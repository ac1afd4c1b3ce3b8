"""Single names in a container's folder: create, recognise and remove files and links.

All functions use the folder's descriptor and the name, and follow no link.
"""

import errno
import os
import stat

from gpuhook.base.container import kernel
from gpuhook.base.container.rootfs import PATH_FLAGS, read_all, read_link, reopen
from gpuhook.base.fileio import write_all

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Final, TypeVar

    T = TypeVar("T")

_LINK_FLAGS: "Final" = PATH_FLAGS | os.O_NOFOLLOW
_MAX_FILE: "Final" = 64 << 20


class OldFile:
    """Former content of a name that was replaced: a link or a regular file."""

    def __init__(
        self, status: os.stat_result, data: bytes, link: str | None, label: bytes | None
    ) -> None:
        self.status = status
        self.data = data
        self.link = link
        self.label = label

    def put_back(self, parent: int, name: str) -> None:
        """Restore the former content."""
        owner = (self.status.st_uid, self.status.st_gid)
        if self.link is not None:
            put_link(parent, name, self.link, owner)
        else:
            mode = stat.S_IMODE(self.status.st_mode)
            put_file(parent, name, self.data, mode, owner, self.label)


def remember(parent: int, name: str) -> OldFile | None:
    """Save the content of a name; OSError if it is neither a link nor a regular file."""
    fd = open_here(parent, name)
    if fd is None:
        return None
    try:
        status = os.fstat(fd)
        if stat.S_ISLNK(status.st_mode):
            link = os.readlink("", dir_fd=fd)  # protects: one-link
            return OldFile(status, b"", link, None)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it exists, but is not a regular file", name)
        readable = reopen(fd)
    finally:
        os.close(fd)
    try:
        data = read_all(readable, _MAX_FILE, name)
        return OldFile(status, data, None, _label(readable))
    finally:
        os.close(readable)


def _label(fd: int) -> bytes | None:
    """Return a file's SELinux label, None if it has none."""
    try:
        return os.getxattr(fd, kernel.LABEL)
    except OSError:
        return None


def make(owner: tuple[int, int], create: "Callable[..., T]", *args: object) -> "T":
    """Create something, as the container's root user if the filesystem knows no other owner.

    A filesystem mounted in a user namespace refuses owners that aren't mapped into the namespace,
    such as the host's root (EOVERFLOW, fs/namei.c).
    """
    try:
        return create(*args)
    except OSError as error:
        if error.errno != errno.EOVERFLOW or owner == (0, 0):  # protects: owner-mapped
            raise
    kernel.act_as(owner)
    try:
        return create(*args)
    finally:
        kernel.act_as((0, 0))


def put_file(
    parent: int, name: str, data: bytes, mode: int, owner: tuple[int, int], label: bytes | None
) -> None:
    """Put a regular file with content, mode, owner and SELinux label at a name, atomically."""
    temporary = _free(parent, name)
    fd = make(owner, kernel.create_file, parent, temporary, 0o600)  # protects: file-by-folder
    try:
        write_all(fd, data, kernel.write)
        if owner != (0, 0):
            kernel.give(fd, owner)  # protects: given-by-descriptor
        kernel.set_mode(fd, mode)
        # On a mount with one label for all files (context=, as podman uses), none can be set.
        if label is not None and label != _label(fd):  # protects: label-kept
            kernel.set_label(fd, label)
        kernel.rename(parent, temporary, name)
    except OSError:
        kernel.remove_file(parent, temporary)
        raise
    finally:
        os.close(fd)


def put_link(parent: int, name: str, target: str, owner: tuple[int, int]) -> None:
    """Put a link to ``target`` with that owner at a name, atomically."""
    temporary = _free(parent, name)
    make(owner, kernel.create_link, parent, temporary, target)  # protects: relink-by-folder
    try:
        if owner != (0, 0):
            _give_link(parent, temporary, owner)
        kernel.rename(parent, temporary, name)
    except OSError:
        kernel.remove_file(parent, temporary)
        raise


def _give_link(parent: int, name: str, owner: tuple[int, int]) -> None:
    """Change the owner of a link; OSError if it was replaced by something else meanwhile."""
    fd = os.open(name, _LINK_FLAGS, dir_fd=parent)
    try:
        if not stat.S_ISLNK(os.fstat(fd).st_mode):  # protects: given-link
            raise OSError(errno.EBUSY, "it was replaced while it was created", name)
        kernel.give(fd, owner)
    finally:
        os.close(fd)


def temporary(name: str) -> str:
    """Return the temporary name of a file or link that is to become ``name``."""
    return f".{name}.gpuhook"


def _free(parent: int, name: str) -> str:
    """Return the temporary name, and remove what a killed process may have left there."""
    free = temporary(name)
    try:
        kernel.remove_file(parent, free)  # protects: leftover-file
    except FileNotFoundError:
        pass
    return free


def open_here(parent: int, name: str) -> int | None:
    """Return an O_PATH descriptor of a name in a folder, of the link itself if it is one."""
    try:
        return os.open(name, _LINK_FLAGS, dir_fd=parent)
    except FileNotFoundError:
        return None


def same(one: os.stat_result, other: os.stat_result) -> bool:
    """Tell whether both are the same file, or nodes of the same device."""
    if stat.S_ISCHR(one.st_mode) and stat.S_ISCHR(other.st_mode):
        return one.st_rdev == other.st_rdev
    return (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino)


def remove_link(parent: int, name: str, target: str) -> None:
    """Remove a link that we created, if it still leads to ``target``."""
    if read_link(parent, name) == target:
        kernel.remove_file(parent, name)


def remove_same(parent: int, name: str, made: os.stat_result) -> None:
    """Remove a file that we created, if the name still refers to that file."""
    try:
        now = os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return
    if (now.st_dev, now.st_ino) == (made.st_dev, made.st_ino):
        kernel.remove_file(parent, name)

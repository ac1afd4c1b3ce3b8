"""Locations of simulated roots: checking one, moving a finished tree there, deleting a root.

Root creates files by their paths in the tree, so no other user may be able to redirect them.
"""

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator

from gpuhook.base.errors import SimulateError
from gpuhook.base.host import lock, proc
from gpuhook.base.host.files import check_way, exchange

_MOUNTS = "/proc/self/mountinfo"
MARKER = ".gpuhook-simulated"  # at the top of every simulated root
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def check_place(root: str) -> None:
    """Raise SimulateError unless a driver root can be built or replaced at this path."""
    if os.geteuid() != 0:
        raise SimulateError("Only root can create device nodes", "Run the command as root")
    existing = root
    while not os.path.exists(existing):
        existing = os.path.dirname(existing)
    if not os.path.isdir(existing):
        raise SimulateError(f"{existing} is not a folder", "Choose a folder for the driver root")
    if existing == root:
        _check_replaceable(root)
    if os.statvfs(existing).f_flag & os.ST_NODEV:
        raise SimulateError(
            f"{existing} is on a file system mounted with nodev, where device nodes don't work",
            "Choose a folder on another file system",
        )


def _check_replaceable(root: str) -> None:
    if os.listdir(root) and not is_simulated(root):
        raise SimulateError(
            f"{root} is not empty and isn't a simulated driver root",
            "Choose a folder that doesn't exist yet",
        )
    _check_no_mounts(root)


def is_simulated(root: str) -> bool:
    """Tell whether the folder is a root that simulate built."""
    return os.path.isfile(os.path.join(root, MARKER))


def _check_no_mounts(root: str) -> None:
    """Refuse a tree with mounts: deleting it could reach the host's own /dev."""
    mounted = [proc.unescaped(mount.point) for mount in proc.Mounts(proc.read(_MOUNTS))]
    inside = [point for point in mounted if point == root or point.startswith(f"{root}/")]
    if inside:
        raise SimulateError(f"Something is mounted on {inside[0]}", "Unmount it and try again")


@contextlib.contextmanager
def new_tree(root: str) -> Iterator[str]:
    """Create a folder next to ``root`` for a tree that will be moved there; delete it afterwards.

    It has the marker from the start, and is locked while in use. So leftovers of a killed process
    can be distinguished from another's work, and the next build deletes them.
    """
    parent, name = os.path.split(root)
    os.makedirs(parent, exist_ok=True)
    _remove_left(parent, name)
    new = tempfile.mkdtemp(prefix=f".{name}.", dir=parent)
    fd = os.open(new, _FOLDER)
    try:
        lock.take(fd)
        os.fchmod(fd, 0o755)
        os.close(os.open(MARKER, os.O_CREAT | os.O_CLOEXEC, 0o644, dir_fd=fd))
        yield new
    finally:
        shutil.rmtree(new, ignore_errors=True)
        os.close(fd)


def _remove_left(parent: str, name: str) -> None:
    """Delete the trees of processes that were killed while they built this root."""
    for each in os.listdir(parent):
        left = os.path.join(parent, each)
        if not re.fullmatch(rf"\.{re.escape(name)}\..{{8}}", each) or not is_simulated(left):
            continue
        with contextlib.suppress(OSError, SimulateError):  # another process deletes or uses it
            fd = os.open(left, _FOLDER)
            try:
                if lock.take(fd):
                    _check_no_mounts(left)
                    shutil.rmtree(left)
            finally:
                os.close(fd)


def put_in_place(new: str, root: str) -> None:
    """Move the tree ``new`` to ``root``.

    An existing tree is exchanged with it in one step; ``new`` then contains the old one.
    """
    if not os.path.isdir(root):
        os.rename(new, root)
        return
    try:
        exchange(new, root)
    except OSError as error:
        raise SimulateError(
            f"{root} can't be replaced ({error.strerror})",
            "Remove it with gpuhook simulate --remove and build it again",
        ) from None


def remove(root: str, links: str = "/dev/char") -> None:
    """Delete a simulated driver root, and the links to its nodes; SimulateError if it isn't one.

    UntrustedPathError if another user could redirect root. ``links`` is the folder in which
    gpuhook makes links to devices' nodes.
    """
    check_way(root)  # protects: removed-way
    named = os.path.abspath(root)
    root = os.path.realpath(root)
    if not is_simulated(root):
        raise SimulateError(
            f"{root} is not a simulated driver root", "Name the folder that simulate built"
        )
    _check_no_mounts(root)
    _remove_left(*os.path.split(root))
    try:
        shutil.rmtree(root)
    except OSError as error:
        raise SimulateError(
            f"{root} can't be removed ({error})", "Check that you are root and try again"
        ) from error
    _remove_links(links, (named, root))


def _remove_links(folder: str, roots: tuple[str, ...]) -> None:
    """Remove the links in a folder that lead to nodes below one of the roots."""
    below = tuple(f"{root}/dev/" for root in roots)
    try:
        links = [entry.path for entry in os.scandir(folder) if entry.is_symlink()]
    except OSError:
        return
    for link in links:
        with contextlib.suppress(OSError):  # another process may remove it, too
            if os.readlink(link).startswith(below):
                os.unlink(link)

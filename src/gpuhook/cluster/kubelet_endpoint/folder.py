"""Sockets in a folder of the kubelet.

A kubelet that starts removes all sockets in the folder and then creates its own. A socket is
recognized by its identity, because a new one has the name of the old one.
"""

import os
import re
import socket
import stat

from gpuhook.base.errors import PluginError, UntrustedPathError
from gpuhook.base.host import files

_LONGEST = 107  # bytes of a socket's path, without the NUL: sun_path of unix(7)

Identity = tuple[int, int, int]


def check_there(path: str) -> None:
    """Raise PluginError if the folder at this path was deleted.

    A pod has the old folder mounted, so it doesn't see the one that replaced it.
    """
    try:
        deleted = os.stat(path).st_nlink == 0
    except OSError:
        return
    if deleted:
        raise PluginError(
            f"The kubelet's folder {path} was deleted on the node, and this container has the "
            "deleted one mounted: nothing in it reaches the kubelet",
            "Restart this container, as the kubelet does on its own: it gets the new folder",
        )


def identity(path: str) -> Identity | None:
    """Return the identity of the socket at a path, None if there is none."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    # Small filesystems reuse an inode number at once, so the time is part of the identity.
    is_socket = stat.S_ISSOCK(found.st_mode)
    return (found.st_dev, found.st_ino, found.st_ctime_ns) if is_socket else None


def sweep(folder: str, ours: str) -> None:
    """Remove sockets that no process serves, left by killed processes.

    ``ours`` is a regular expression of their names.
    """
    try:
        names = os.listdir(folder)
    except OSError:
        return
    for path in (f"{folder}/{name}" for name in names if re.fullmatch(ours, name)):
        if identity(path) and not _is_served(path):
            _remove(path)


def free(path: str) -> None:
    """Ensure that a socket can be created at a path; PluginError if it can't.

    A socket there that no process serves is removed.
    """
    folder = os.path.dirname(path)
    if len(os.fsencode(path)) > _LONGEST:
        raise PluginError(
            f"The path {path} is too long for a socket: at most {_LONGEST} bytes are allowed",
            "Use a shorter folder, or a shorter name",
        )
    if not os.path.isdir(folder):
        raise PluginError(
            f"The kubelet's folder {folder} isn't there",
            "The kubelet creates it when it starts; if it uses another one, name that one",
        )
    try:
        files.check_way(path)
    except UntrustedPathError as error:
        raise PluginError(error.cause, error.remedy) from None
    if identity(path) is None:
        if os.path.lexists(path):
            raise PluginError(f"{path} exists and isn't a socket", "Remove it")
    elif _is_served(path):
        raise PluginError(
            f"Another process serves {path}", "Run one device plugin of gpuhook on a node"
        )
    else:
        _remove(path)


def _is_served(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except BlockingIOError:  # the queue of connections is full
            return True
        except OSError:
            return False
    return True


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise PluginError(
            f"{path} can't be removed: {error.strerror}",
            "Run gpuhook as root, with this folder writable",
        ) from None

"""A folder of the kubelet: its sockets, and their changes.

A kubelet that starts removes all sockets in the folder and then creates its own. The folder is
watched with inotify(7), and polled where inotify reports nothing. A socket is recognized by its
identity, because a new one has the name of the old one.
"""

import os
import re
import socket
import stat

from gpuhook.base.container.clib import Library
from gpuhook.base.errors import PluginError, UntrustedPathError
from gpuhook.base.host import files

_LONGEST = 107  # bytes of a socket's path, without the NUL: sun_path of unix(7)

# sys/inotify.h: entries that are renamed, created or deleted, and the folder itself.
_MOVED, _CREATED, _DELETED, _SELF = 0xC0, 0x100, 0x200, 0x400 | 0x800
_ONLY_A_FOLDER = 0x1000000
_MASK = _MOVED | _CREATED | _DELETED | _SELF | _ONLY_A_FOLDER
_PIECE = 1 << 16  # bytes of events that are read at once

Identity = tuple[int, int, int]

_libc = Library()


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


class Folder:
    """The folder, which may be missing, or be removed and created again."""

    def __init__(self, path: str) -> None:
        """Start to watch. ``events`` is readable after a change; -1 without inotify."""
        self.path = path
        self.events: int = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        self._watched = -1
        self.watch()

    def watch(self) -> None:
        """Discard the events so far, and watch the folder that is now at this path."""
        if self.events < 0:
            return
        try:
            while os.read(self.events, _PIECE):
                pass
        except BlockingIOError:
            pass
        # For a folder that is already watched, the kernel returns the same number.
        watched = _libc.inotify_add_watch(self.events, os.fsencode(self.path), _MASK)
        if self._watched not in (-1, watched):
            _libc.inotify_rm_watch(self.events, self._watched)  # fails if that one was removed
        self._watched = watched

    def close(self) -> None:
        """Stop watching."""
        if self.events >= 0:
            os.close(self.events)
            self.events = -1

    def identity(self, name: str) -> Identity | None:
        """Return the identity of a socket in the folder, None if there is none."""
        try:
            found = os.lstat(f"{self.path}/{name}")
        except OSError:
            return None
        # Small filesystems reuse an inode number at once, so the time is part of the identity.
        is_socket = stat.S_ISSOCK(found.st_mode)
        return (found.st_dev, found.st_ino, found.st_ctime_ns) if is_socket else None

    def sweep(self, ours: re.Pattern[str]) -> None:
        """Remove sockets with such names that no process serves: those left by killed processes."""
        try:
            names = os.listdir(self.path)
        except OSError:
            return
        for name in filter(ours.fullmatch, names):
            if self.identity(name) and not self._is_served(name):
                self.remove(name)

    def free(self, name: str) -> str:
        """Return ``name`` once no socket has it; PluginError if it can't be used.

        A socket that no process serves is removed.
        """
        path = f"{self.path}/{name}"
        if len(os.fsencode(path)) > _LONGEST:
            raise PluginError(
                f"The path {path} is too long for a socket: at most {_LONGEST} bytes are allowed",
                "Use a shorter folder, or a shorter name",
            )
        if not os.path.isdir(self.path):
            raise PluginError(
                f"The kubelet's folder {self.path} isn't there",
                "The kubelet creates it when it starts; if it uses another one, name that one",
            )
        try:
            files.check_way(path)
        except UntrustedPathError as error:
            raise PluginError(error.cause, error.remedy) from None
        self._make_free(name)
        return name

    def _make_free(self, name: str) -> None:
        path = f"{self.path}/{name}"
        if self.identity(name) is None:
            if os.path.lexists(path):
                raise PluginError(f"{path} exists and isn't a socket", "Remove it")
            return
        if self._is_served(name):
            raise PluginError(
                f"Another process serves {path}", "Run one device plugin of gpuhook on a node"
            )
        self.remove(name)

    def _is_served(self, name: str) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.setblocking(False)
            try:
                probe.connect(f"{self.path}/{name}")
            except BlockingIOError:  # the queue of connections is full
                return True
            except OSError:
                return False
        return True

    def remove(self, name: str) -> None:
        """Remove a gpuhook socket if it still exists; PluginError if that fails."""
        try:
            os.unlink(f"{self.path}/{name}")
        except FileNotFoundError:
            pass
        except OSError as error:
            raise PluginError(
                f"{self.path}/{name} can't be removed: {error.strerror}",
                "Run the device plugin as root, with this folder writable",
            ) from None

"""Classification of a container's mounts: its own ones, and those shared with the host.

A volume is a folder of the host (or of another container): nothing may be created in it. A
shared mount propagates what is mounted on it to its peers: nothing may be mounted on one that
has a peer on the host. Both are found by comparing the container's mount table with the one
that the hook was started in. A hook that is started in the container's namespace finds both in
one table: before the root is pivoted, it still has the host's mounts, and the mounts on the
container's root are the container's. Source: proc(5), /proc/PID/mountinfo;
Documentation/filesystems/sharedsubtree.rst.
"""

import os

from gpuhook.base.container import kernel
from gpuhook.base.host import proc
from gpuhook.base.oci.jsontext import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Final

_READ_FLAGS: "Final" = os.O_RDONLY | os.O_CLOEXEC


def mount_id(fd: int) -> bytes:
    """Return the id (digits) of the mount that a descriptor's file was reached through."""
    return b"%d" % kernel.mount_id(fd)


class MountPermissions(Record):
    """Permissions on one mount.

    ``own``: files may be created there. ``shared``: mounts on it appear on the host.
    """

    own: bool
    shared: bool


class Boundary:
    """Classifier of a container's mounts: its own ones, and those it shares with the host.

    Must be created while this process is in the host's mount namespace. With ``inside`` it is in
    the container's, before its root is pivoted.
    """

    def __init__(self, process: int, root: int, *, inside: bool = False) -> None:
        """Take the descriptors of /proc/PID and of the container's root; OSError if gone."""
        self._inside = inside
        self._host = os.open("/proc/self/mountinfo", _READ_FLAGS)
        try:
            self._container = os.open("mountinfo", _READ_FLAGS, dir_fd=process)
        except OSError:
            os.close(self._host)
            raise
        self._root = mount_id(root)
        self._host_table: proc.Mounts | None = None
        self._table = proc.Mounts(b"")
        self._known: dict[bytes, MountPermissions] = {}

    def close(self) -> None:
        """Close both tables."""
        os.close(self._host)
        os.close(self._container)

    def adopt(self, root: int, tables: "list[bytes]") -> bool:
        """Judge as inside, and treat the filesystem that the root is mounted on as its own.

        Some engines mount a filesystem for each container, mount the root in it, and then mount
        folders of that filesystem in the root. ``tables`` are mount tables of the host. Returns
        False and changes nothing if there are none, if one of them has that filesystem or the
        root's mount, or if the root isn't a mount point.
        """
        table = _read(self._container)
        mount = table.find(self._root)
        parent = table.find(mount.parent) if mount is not None else None
        if parent is None or not tables or not is_mount(root):
            return False
        for each in map(proc.Mounts, tables):
            if each.has_device(parent.device) or each.find(self._root) is not None:
                return False
        self._host_table = outside(table, self._root).without(device=parent.device)
        return True

    def settle(self, place: str, tables: "list[bytes]") -> None:
        """Judge for a root folder ``place`` of this namespace, which has the host's mounts.

        A mount below it is its own, unless the same filesystem is also mounted elsewhere, here or
        in ``tables``, the mount tables of other processes. Without those, a mount on the folder
        itself may appear wherever its parent mount is visible.
        """
        table, below = _read(self._container), place.rstrip("/") + "/"
        inside = {each.id for each in table if proc.unescaped(each.point).startswith(below)}
        others = b"".join(tables)
        # protects: folder-volumes
        self._host_table = proc.Mounts(table.without(inside).text + others)
        known = table.find(self._root)
        groups = [tag for tag in known.tags if tag.startswith(b"shared:")] if known else []
        shared = bool(groups) and proc.Mounts(others).has_group(groups[0])
        self._known[self._root] = MountPermissions(own=True, shared=shared)

    def is_mounted_on(self) -> bool:
        """Tell whether anything is mounted below the root, as in every container's namespace."""
        return len(_read(self._container).below(self._root)) > 1

    def mounts(self) -> "Iterator[tuple[str, proc.MountInfo]]":
        """Yield the mounts on and below the root, with their paths in the root."""
        table = _read(self._container)
        top, inside = table.find(self._root), table.below(self._root)
        place = b"" if top is None else top.point.rstrip(b"/")
        for mount in table:
            if mount.id in inside:
                yield proc.unescaped(mount.point.removeprefix(place)) or "/", mount

    def mounted(self, place: str) -> list[str]:
        """Return the mount points in the root; ``place`` is the root's path here."""
        table, below = _read(self._container), place.rstrip("/") + "/"
        points = (proc.unescaped(each.point) for each in table)
        return [f"/{point.removeprefix(below)}" for point in points if point.startswith(below)]

    def verdict(self, fd: int) -> MountPermissions:
        """Return the permissions on the mount of a file or folder of the container."""
        mount = mount_id(fd)
        found = self._known.get(mount)
        if found is None:
            found = self._known[mount] = self._judge(mount)
        return found

    def _judge(self, mount: bytes) -> MountPermissions:
        found = self._table.find(mount)
        if found is None:
            self._table = _read(self._container)
            found = self._table.find(mount)
        if found is None:
            return MountPermissions(mount == self._root, False)
        groups = [tag for tag in found.tags if tag.startswith(b"shared:")]
        shared = bool(groups) and self._host_mounts().has_group(groups[0])
        # A filesystem that isn't mounted on the host was made for this container.
        # protects: own-or-volume
        own = mount == self._root or not self._host_mounts().has_device(found.device)
        return MountPermissions(own, shared)  # protects: own-mount

    def _host_mounts(self) -> proc.Mounts:
        if self._host_table is None:
            table = _read(self._host)
            # protects: host-table
            self._host_table = outside(table, self._root) if self._inside else table
        return self._host_table


def is_mount(folder: int) -> bool:
    """Tell whether a folder is the root of its mount, by comparing it with its parent."""
    above = os.open("..", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
    try:
        return mount_id(above) != mount_id(folder)
    finally:
        os.close(above)


def outside(table: proc.Mounts, root: bytes) -> proc.Mounts:
    """Return a mount table without a mount and those below it: the host's own mounts.

    A container's copies of the host's mounts are usually slaves: their masters are the host's.
    """
    return table.without(table.below(root)).as_copied()


def _read(fd: int) -> proc.Mounts:
    os.lseek(fd, 0, os.SEEK_SET)
    return proc.Mounts(proc.read_open(fd))

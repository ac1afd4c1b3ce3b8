"""Which of a container's mounts are its own, and which would carry a change to the host.

A volume is a folder of the host (or of another container): nothing may be made in it. A
shared mount hands on what is mounted on it to its peers: nothing may be mounted on one
that has a peer on the host. Both are told by comparing the container's mount table with
the one that the hook was started in. A hook that is started in the container's namespace
finds both in one table: before the root is pivoted, it still has the host's mounts, and
what is mounted on the container's root is the container's. Source: proc(5),
/proc/PID/mountinfo; Documentation/filesystems/sharedsubtree.rst.
"""

import os

from gpuhook.container import kernel

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final

_READ_FLAGS: "Final" = os.O_RDONLY | os.O_CLOEXEC
_CHUNK: "Final" = 1 << 16


def mount_id(fd: int) -> bytes:
    """Return the id of the mount that a descriptor's file was reached through, as digits."""
    return b"%d" % kernel.mount_id(fd)


class Verdict:
    """What may be done on one mount.

    ``own``: files may be made there; ``shared``: what is mounted there shows on the host.
    """

    __slots__ = ("own", "shared")

    def __init__(self, own: bool, shared: bool) -> None:
        self.own = own
        self.shared = shared


class Boundary:
    """Tells the container's own mounts from those that it has in common with the host.

    Must be made while this process is in the host's mount namespace, or else ``inside``: in
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
        self._host_table: bytes | None = None
        self._table = b""
        self._known: dict[bytes, Verdict] = {}

    def close(self) -> None:
        """Let go of both tables."""
        os.close(self._host)
        os.close(self._container)

    def adopt(self, root: int, tables: "list[bytes]") -> None:
        """Judge as inside, and count the filesystem that the root is mounted on as its own.

        Some engines mount a filesystem for each container first and the root in it, and then
        folders of the former in the latter. ``tables`` are mount tables of the host's. Nothing
        changes without any, where one of them has that filesystem or the root's mount, or where
        the root is no mount of its own.
        """
        table = _read(self._container)
        fields = {line.split(b" ", 1)[0]: line.split(b" ", 3) for line in table.splitlines()}
        parent = fields[self._root][1] if self._root in fields else b""
        if parent not in fields or not tables or not is_mount(root):
            return
        device = b" " + fields[parent][2] + b" "
        if not any(device in each or _has(each, self._root) for each in tables):
            self._host_table = without(outside(table, self._root), device)

    def is_mounted_on(self) -> bool:
        """Tell whether anything is mounted below the root, as in every container's namespace."""
        return len(below(_read(self._container), self._root)) > 1

    def verdict(self, fd: int) -> Verdict:
        """Return what may be done on the mount of a file or folder of the container."""
        mount = mount_id(fd)
        found = self._known.get(mount)
        if found is None:
            found = self._known[mount] = self._judge(mount)
        return found

    def _judge(self, mount: bytes) -> Verdict:
        fields, group = self._line(mount)
        shared = bool(group) and group in self._host_mounts()
        own = mount == self._root
        if not own and fields:
            # A filesystem that the host hasn't mounted was made for this container.
            own = b" " + fields[2] + b" " not in self._host_mounts()
        return Verdict(own, shared)

    def _host_mounts(self) -> bytes:
        if self._host_table is None:
            table = _read(self._host)
            self._host_table = outside(table, self._root) if self._inside else table
        return self._host_table

    def _line(self, mount: bytes) -> tuple[list[bytes], bytes]:
        """Return the fields of a mount's line and its peer group as " shared:N "."""
        start = b"\n" + mount + b" "
        if start not in self._table:
            self._table = b"\n" + _read(self._container)
        _, found, rest = self._table.partition(start)
        line = (found + rest.partition(b"\n")[0]).strip()
        fields = line.partition(b" - ")[0].split(b" ")
        if len(fields) < 6:
            return [], b""
        groups = [field for field in fields[6:] if field.startswith(b"shared:")]
        return fields, b" " + groups[0] + b" " if groups else b""


def is_mount(folder: int) -> bool:
    """Tell whether a folder is the root of its mount, by what is above it."""
    above = os.open("..", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
    try:
        return mount_id(above) != mount_id(folder)
    finally:
        os.close(above)


def _has(table: bytes, mount: bytes) -> bool:
    """Tell whether a table has a mount: a mount is in one namespace alone."""
    return (b"\n" + table).find(b"\n" + mount + b" ") >= 0


def below(table: bytes, root: bytes) -> set[bytes]:
    """Return the ids of a mount and of all that are on it, on those, and so on."""
    pairs = [line.split(b" ", 2)[:2] for line in table.splitlines()]
    found, before = {root}, 0
    while len(found) > before:  # a mount may stand before the one that it is on
        before = len(found)
        found.update(mount for mount, parent in pairs if parent in found)
    return found


def outside(table: bytes, root: bytes) -> bytes:
    """Return a mount table without a mount and those on it: what is known of the host's own.

    A container's copies of the host's mounts are slaves of those as a rule: their masters are
    what the host has.
    """
    inside = below(table, root)
    lines = table.splitlines(keepends=True)
    others = b"".join(line for line in lines if line.partition(b" ")[0] not in inside)
    return others.replace(b" master:", b" shared:")


def without(table: bytes, device: bytes) -> bytes:
    """Return a mount table without the mounts of one filesystem; ``device`` is blank-padded."""
    lines = table.splitlines(keepends=True)
    return b"".join(line for line in lines if device not in line.partition(b" - ")[0])


def _read(fd: int) -> bytes:
    os.lseek(fd, 0, os.SEEK_SET)
    chunks = []
    while chunk := os.read(fd, _CHUNK):
        chunks.append(chunk)
    return b"".join(chunks)

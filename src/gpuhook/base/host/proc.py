r"""Reader of /proc: processes, their cgroups and mounts, as bytes.

Users choose the names of processes, cgroups and folders, in any bytes. Lines in /proc end with a
newline, the only byte that the kernel forbids in such names or escapes, and fields with a blank.
Other characters that Python treats as line or field ends (\r, \v, U+2028 ...) are parts of
names. Reading is bounded, and a malformed line is skipped.

Sources: proc_pid_mountinfo(5), cgroups(7), proc_pid_status(5), proc_pid_stat(5); the kernel's
fs/proc_namespace.c and kernel/cgroup/cgroup.c, which refuses a newline in a cgroup's name.

Imports only errno and os, because container starts read these files.
"""

import errno
import os

from gpuhook.base.fileio import read_start

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Container, Iterator
    from typing import Final

MAX_BYTES: "Final" = 1 << 26  # bytes; the mount table of a busy node has some MiB
FIRST_PIDS: "Final" = 0xEFFFFFFC  # PROC_PID_INIT_INO of include/linux/proc_ns.h
# Characters that mountinfo writes as \ooo: blank, tab, newline, backslash, and # in sources.
_ESCAPED: "Final" = {b"040": b" ", b"011": b"\t", b"012": b"\n", b"134": b"\\", b"043": b"#"}


def read(path: str, folder: "int | None" = None, most: int = MAX_BYTES) -> bytes:
    """Return a file of /proc, relative to a descriptor if one is given.

    OSError if it can't be read, and for more than ``most`` bytes.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder)
    try:
        return read_open(fd, most)
    finally:
        os.close(fd)


def data_of(path: str) -> bytes:
    """Return a file of /proc, b"" if it is gone or we may not read it."""
    try:
        return read(path)
    except OSError:
        return b""


def pids() -> int:
    """Return the number of the pid namespace whose ids /proc has, 0 if we aren't in it.

    ``FIRST_PIDS`` is the host's initial one, which sees all processes. It also stands for one
    that we can't identify. Ours may be below it: a hook may run in its container's namespace,
    with the host's /proc.
    """
    try:
        if os.stat("/proc/self/ns/pid").st_ino == FIRST_PIDS:  # no other /proc shows us
            return FIRST_PIDS
    except OSError:
        pass
    entry = "self"
    while entry != "0":
        try:
            found = status(read(f"/proc/{entry}/status"))
        except OSError:
            return 0 if entry == "self" else FIRST_PIDS
        if len(found.get("NSpid", ())) < 2:  # one id per namespace, starting with that of /proc
            break
        entry = found["PPid"][0]
    try:
        return os.stat(f"/proc/{entry}/ns/pid").st_ino
    except OSError:
        return FIRST_PIDS


def read_open(fd: int, most: int = MAX_BYTES) -> bytes:
    """Return the rest of an open file; OSError for more than ``most`` bytes."""
    data = read_start(fd, most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it is larger than {most} bytes")
    return data


def lines(data: bytes) -> list[bytes]:
    """Return the lines, without their newlines."""
    return data.removesuffix(b"\n").split(b"\n")  # protects: newline-alone


def words(line: bytes) -> list[bytes]:
    """Return the parts between blanks and tabs, for files with aligned columns."""
    return [word for word in line.replace(b"\t", b" ").split(b" ") if word]


def stat_fields(data: bytes) -> list[bytes]:
    """Return the fields of /proc/PID/stat from the third one on, the state.

    The second one, in brackets, may contain any characters.
    """
    return data.rpartition(b") ")[2].removesuffix(b"\n").split(b" ")


def status(data: bytes) -> dict[str, list[str]]:
    """Return the content of /proc/PID/status: each key with its words.

    ``Name`` is one word, the whole name as the kernel has it, even if it contains blanks.
    """
    found = {}
    for line in lines(data):
        key, colon, value = line.partition(b":")
        if colon:
            whole = key == b"Name"
            said = [value.removeprefix(b"\t")] if whole else words(value)
            found[os.fsdecode(key)] = [os.fsdecode(word) for word in said]
    return found


def cgroups(data: bytes) -> dict[str, str]:
    """Return the content of /proc/PID/cgroup: the controllers of a hierarchy -> the path in it.

    The unified hierarchy has no controllers there. Paths are relative to the root of our cgroup
    namespace.
    """
    found = {}
    for line in lines(data):
        number, _, rest = line.partition(b":")
        controllers, _, path = rest.partition(b":")
        if number.isdigit() and path.startswith(b"/"):
            found[os.fsdecode(controllers)] = os.fsdecode(path)
    return found


def id_map(data: bytes) -> list[tuple[int, int, int]]:
    """Return the ranges of /proc/PID/uid_map or gid_map: inside, outside, how many.

    Source: user_namespaces(7).
    """
    found = [words(line) for line in lines(data)]
    return [(int(each[0]), int(each[1]), int(each[2])) for each in found if len(each) == 3]


class MountInfo:
    """A line of /proc/PID/mountinfo, its fields unchanged except ``tags``.

    ``device`` is b"MAJOR:MINOR"; ``flags`` are the mount's own, ``options`` the filesystem's;
    ``tags`` are the propagation's, such as b"shared:5".
    """

    __slots__ = (
        "device", "flags", "id", "kind", "options", "parent", "point", "root", "source", "tags",
    )  # fmt: skip

    def __init__(self, fields: list[bytes], filesystem: list[bytes]) -> None:
        self.id, self.parent, self.device, self.root, self.point, self.flags = fields[:6]
        self.tags = fields[6:]
        self.kind, self.source, self.options = filesystem


def _mount(line: bytes) -> "MountInfo | None":
    left, _, right = line.partition(b" - ")
    fields, filesystem = left.split(b" "), right.split(b" ", 2)
    if len(fields) < 6 or len(filesystem) < 3:
        return None
    is_one = fields[0].isdigit() and fields[1].isdigit() and fields[2].count(b":") == 1
    return MountInfo(fields, filesystem) if is_one else None


def unescaped(field: bytes) -> str:
    """Return a path of mountinfo without escapes."""
    first, *rest = field.split(b"\\")
    made = [
        _ESCAPED[part[:3]] + part[3:] if part[:3] in _ESCAPED else b"\\" + part for part in rest
    ]
    return os.fsdecode(first + b"".join(made))


class Mounts:
    """A mount table, parsed lazily: it may have ten thousand lines."""

    __slots__ = ("_text",)

    def __init__(self, table: bytes) -> None:
        self._text = b"\n" + table if table.endswith(b"\n") or not table else b"\n%s\n" % table

    @property
    def text(self) -> bytes:
        """The table's lines."""
        return self._text[1:]

    def __iter__(self) -> "Iterator[MountInfo]":
        for line in lines(self._text):
            mount = _mount(line)
            if mount is not None:
                yield mount

    def find(self, number: bytes) -> "MountInfo | None":
        """Return the mount with an id, None if it doesn't exist in this namespace."""
        start = self._text.find(b"\n%s " % number) + 1
        return _mount(self._text[start : self._text.find(b"\n", start)]) if start else None

    def has_device(self, device: bytes) -> bool:
        """Tell whether a filesystem, given as b"MAJOR:MINOR", is mounted."""
        # protects: source-is-no-device
        return any(head.count(b" ") == 1 for head in self._before(device))

    def has_group(self, tag: bytes) -> bool:
        """Tell whether a mount is in a peer group, such as b"shared:5"."""
        return any(head.count(b" ") > 4 and b" - " not in head for head in self._before(tag))

    def _before(self, field: bytes) -> "Iterator[bytes]":
        """Yield the beginning of each line up to a field, for each occurrence of the field.

        Users can mount with a source that looks like a device or a group.
        """
        field, at = b" %s " % field, 0
        while (at := self._text.find(field, at)) >= 0:
            yield self._text[self._text.rfind(b"\n", 0, at) : at]
            at += 1

    def below(self, root: bytes) -> set[bytes]:
        """Return the ids of a mount and of all mounts on it, recursively."""
        pairs = [fields[:2] for _, fields in self._beginnings()]
        found, before = {root}, 0
        while len(found) > before:  # a mount may be listed before its parent
            before = len(found)
            found.update(number for number, parent in pairs if parent in found)
        return found

    def without(self, numbers: "Container[bytes]" = (), device: bytes = b"") -> "Mounts":
        """Return the table without some mounts, and without those of one filesystem."""
        kept = [
            line
            for line, fields in self._beginnings()
            if fields[0] not in numbers and fields[2] != device
        ]
        return Mounts(b"\n".join(kept))

    def _beginnings(self) -> "Iterator[tuple[bytes, list[bytes]]]":
        """Yield each line with its first three fields and the rest."""
        for line in lines(self._text):
            fields = line.split(b" ", 3)
            if len(fields) > 3:
                yield line, fields

    def as_copied(self) -> "Mounts":
        """Return the table with each master group as a shared one."""
        return Mounts(self._text[1:].replace(b" master:", b" shared:"))  # protects: shared-masters

"""Records of root folders with added devices: a file per folder, accessible only to root.

Its lines are JSON: the folder's identity, its state before the first change, and then a line for
each mount or write before it is done. So a run that is killed at any moment can be rolled back. A
record is valid only for that very folder, even if it was moved, and not for another folder at its
path.
"""

import contextlib
import json
import os
from dataclasses import asdict, dataclass, field
from typing import Any

from gpuhook.base.errors import FolderError
from gpuhook.base.fileio import write_all
from gpuhook.base.host import files as host_files
from gpuhook.base.oci.jsontext import has_form
from gpuhook.base.state_directory import boot_id

Place = dict[str, Any]

_FOLDER = "applied"  # in the state folder
_ENDING = ".json"
_MAX_BYTES = 256 << 20
_FIRST_LINE = 64 << 10
_APPEND = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
# Keys of a record, and of a place to restore: for a link, and for a rewritten file.
_PLACE = {"path": str, "named": [str], "written": bool, "made": [str], "was": {"is": str}}
_FORM = {"rootfs": str, "boot": str, "namespace": int, "there": [[str]], "places": [_PLACE]}
_OWNER = {"uid": int, "gid": int, "mode": int}
_LINK = {"target": str, **_OWNER}
_DATA = {"data": str, "label": str | None, **_OWNER}
_MOUNT = {"unique": int | None, "number": int, "device": int, "inode": int}
_NOTES = ({"mount": _MOUNT}, {"place": int, "now": str})


@dataclass(frozen=True)
class FolderIdentity:
    """A folder's identity: its filesystem, its inode, and its birth time in ns.

    Some filesystems get another ``device`` at each mount. Some don't store birth times: then
    ``born`` is None.
    """

    device: int
    inode: int
    born: int | None


@dataclass(frozen=True)
class MountRecord:
    """A mount of ours: ``kernel.unique_mount_id``, ``kernel.mount_id``, and its root's identity."""

    unique: int | None
    number: int
    device: int
    inode: int


@dataclass
class FolderRecord:
    """The record of a folder, in the file ``path``.

    ``boot`` and ``namespace`` are the boot and the mount namespace of our mounts; ``there`` are
    the earlier mounts in the folder, from ``mount_tracking.table``. ``places`` are from
    ``backup.look``.
    """

    path: str
    rootfs: str
    folder: FolderIdentity
    boot: str
    namespace: int
    there: list[list[str]]
    places: list[Place]
    mounts: list[MountRecord] = field(default_factory=list)

    def is_of(self, folder: FolderIdentity) -> bool:
        """Tell whether this is the record of a folder."""
        mine = self.folder
        if (mine.inode, mine.born) != (folder.inode, folder.born):  # protects: noted-folder
            return False
        return mine.device == folder.device or (mine.born is not None and self.boot != boot())

    def save(self) -> None:
        """Write the record, replacing an earlier one; FolderError if that fails."""
        head = {key: getattr(self, key) for key in ("rootfs", "boot", "namespace")}
        lines = [{**head, "folder": asdict(self.folder)}]
        lines.append({"there": self.there, "places": self.places})
        try:
            host_files.check_way(self.path)
            os.makedirs(os.path.dirname(self.path), mode=0o700, exist_ok=True)
            text = "".join(f"{json.dumps(each)}\n" for each in lines)
            host_files.replace(self.path, text.encode(), 0o600)
        except OSError as error:
            raise FolderError(
                f"The state of {self.rootfs} can't be saved in {self.path}: {error.strerror}",
                "Name a writable folder with --state-dir, or use --no-undo",
            ) from None

    def note_mount(self, mount: MountRecord) -> None:
        """Record a mount before it is attached; OSError if that fails."""
        self._note({"mount": asdict(mount)}, lasting=False)  # a mount doesn't outlive a reboot
        self.mounts.append(mount)

    def note_written(self, path: str, data: bytes) -> None:
        """Record a write to a path of the folder in advance; OSError as above."""
        for number, place in enumerate(self.places):
            if path in place["named"]:
                place["now"] = digest(data)
                self._note({"place": number, "now": place["now"]}, lasting=True)

    def _note(self, note: dict[str, Any], *, lasting: bool) -> None:
        fd = os.open(self.path, _APPEND)
        try:
            write_all(fd, f"{json.dumps(note)}\n".encode())
            if lasting:
                os.fdatasync(fd)
        finally:
            os.close(fd)

    def forget(self) -> None:
        """Remove the record."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        with contextlib.suppress(OSError):
            os.rmdir(os.path.dirname(self.path))


def boot() -> str:
    """Return the id of this boot, "" where /proc doesn't show it."""
    try:
        return boot_id()
    except OSError:
        return ""


def digest(data: bytes) -> str:
    """Return the SHA-256 of data."""
    import hashlib  # noqa: PLC0415 - OpenSSL takes 5 ms, and many importers apply nothing

    return hashlib.sha256(data).hexdigest()


def file_of(state: str, rootfs: str) -> str:
    """Return the path of the record for a folder at a path."""
    return os.path.join(state, _FOLDER, f"{digest(os.fsencode(rootfs))[:32]}{_ENDING}")


def load(path: str) -> FolderRecord | None:
    """Return the record in a file, None if there is no file; FolderError for a damaged one."""
    try:
        host_files.check_writers(path)
        *lines, torn = host_files.read(path, _MAX_BYTES).split(b"\n")  # of a run that was killed
        del torn
        head, was, *notes = map(json.loads, lines)
        found = FolderRecord(path, folder=FolderIdentity(**head.pop("folder")), **head, **was)
        if not _is_sound(found):
            raise ValueError("its first line isn't a record of a folder")
        for note in notes:
            if not any(has_form(note, form) for form in _NOTES):
                raise ValueError("a line isn't a record of a change")
            if "mount" in note:
                found.mounts.append(MountRecord(**note["mount"]))
            else:
                found.places[note["place"]]["now"] = note["now"]
    except FileNotFoundError:
        return None
    except (
        OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError
    ) as error:  # fmt: skip
        raise FolderError(
            f"{path}, the record of the folder's former state, can't be read: {error}",
            "Remove it; unmount what is mounted in the folder yourself",
        ) from None
    return found


def _is_sound(record: FolderRecord) -> bool:
    """Tell whether a record has the form written by ``save``, with places of ``backup.look``."""
    values = {key: getattr(record, key) for key in _FORM}
    identity = has_form(asdict(record.folder), {"device": int, "inode": int, "born": int | None})
    return identity and has_form(values, _FORM) and all(map(_is_place, record.places))


def _is_place(place: Place) -> bool:
    may = {key: str for key in ("link", "now") if key in place}
    was = place["was"]
    needed = _LINK if was["is"] == "link" else _DATA if "data" in was else {}
    return has_form(place, {**may, "was": needed})


def search(state: str, folder: FolderIdentity) -> FolderRecord | None:
    """Return the record of a folder that has moved from another path, None if there is none."""
    parent = os.path.join(state, _FOLDER)
    try:
        host_files.check_way(parent)
        names = sorted(os.listdir(parent))
    except OSError:
        return None
    for name in names:
        path = os.path.join(parent, name)
        if name.endswith(_ENDING) and _first_line(path) == asdict(folder):
            return load(path)
    return None


def _first_line(path: str) -> object:
    """Return the identity in a file, None if it can't be read, which isn't an error here."""
    try:
        line = host_files.read_start(path, _FIRST_LINE).partition(b"\n")[0]
        return json.loads(line)["folder"]
    except (OSError, ValueError, KeyError, TypeError):
        return None

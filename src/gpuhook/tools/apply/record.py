"""What is noted of root folders to which devices were given, for root alone: a file for each.

Its lines are JSON: which folder it is, what it was before the first change, and then what is
about to be mounted or written there, a line each before that is done. So a run that is killed at
any moment can be undone. What was noted of a folder counts for that very folder alone, wherever
it is now, and for no other that has come to its place.
"""

import contextlib
import json
import os
from dataclasses import asdict, dataclass, field
from typing import Any

from gpuhook.ground.errors import FolderError
from gpuhook.ground.fileio import write_all
from gpuhook.ground.host import files as host_files
from gpuhook.ground.host import proc
from gpuhook.ground.oci.jsontext import has_form

Place = dict[str, Any]

_FOLDER = "applied"  # in the state folder
_ENDING = ".json"
_LIMIT = 256 << 20
_FIRST_LINE = 64 << 10
_APPEND = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
_BOOT_ID = "/proc/sys/kernel/random/boot_id"
# What is noted, and of a place that is restored: of a link, and of a file that is written again.
_PLACE = {"path": str, "named": [str], "written": bool, "made": [str], "was": {"is": str}}
_FORM = {"rootfs": str, "boot": str, "namespace": int, "there": [[str]], "places": [_PLACE]}
_OWNER = {"uid": int, "gid": int, "mode": int}
_LINK = {"target": str, **_OWNER}
_DATA = {"data": str, "label": str | None, **_OWNER}
_MOUNT = {"unique": int | None, "number": int, "device": int, "inode": int}
_NOTES = ({"mount": _MOUNT}, {"place": int, "now": str})


@dataclass(frozen=True)
class Identity:
    """Which folder it is: of which filesystem, its inode, and when it was made, in ns.

    Some filesystems get another ``device`` when they are mounted anew, and some don't keep when a
    file was made: ``born`` is None then.
    """

    device: int
    inode: int
    born: int | None


@dataclass(frozen=True)
class Attached:
    """A mount of ours: ``kernel.unique_mount_id``, ``kernel.mount_id``, and its root's identity."""

    unique: int | None
    number: int
    device: int
    inode: int


@dataclass
class Record:
    """What is noted of a folder, in the file ``path``.

    ``boot`` and ``namespace`` say when and where it was mounted in; ``there`` is what had been
    mounted in it before, as ``mounted.table`` has it. ``places`` are of ``before.look``.
    """

    path: str
    rootfs: str
    folder: Identity
    boot: str
    namespace: int
    there: list[list[str]]
    places: list[Place]
    mounts: list[Attached] = field(default_factory=list)

    def is_of(self, folder: Identity) -> bool:
        """Tell whether this is noted of that folder."""
        mine = self.folder
        if (mine.inode, mine.born) != (folder.inode, folder.born):  # protects: noted-folder
            return False
        return mine.device == folder.device or (mine.born is not None and self.boot != boot())

    def save(self) -> None:
        """Write it down in the place of what was noted before; FolderError where that can't be."""
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
                f"What {self.rootfs} was can't be written down in {self.path}: {error.strerror}",
                "Name a folder that can be written to with --state-dir, or give --no-undo",
            ) from None

    def note_mount(self, mount: Attached) -> None:
        """Note what is about to be mounted; OSError where that can't be."""
        self._note({"mount": asdict(mount)}, lasting=False)  # a mount doesn't outlive the machine
        self.mounts.append(mount)

    def note_written(self, path: str, data: bytes) -> None:
        """Note what is about to be written to a path of the folder; OSError as above."""
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
        """Remove what was noted."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        with contextlib.suppress(OSError):
            os.rmdir(os.path.dirname(self.path))


def boot() -> str:
    """Return what the kernel calls the time since it was started; proc_sys_kernel(5)."""
    return os.fsdecode(proc.data_of(_BOOT_ID)).strip()


def digest(data: bytes) -> str:
    """Return the SHA-256 of data."""
    import hashlib  # noqa: PLC0415 - OpenSSL takes 5 ms, and many who import this apply nothing

    return hashlib.sha256(data).hexdigest()


def file_of(state: str, rootfs: str) -> str:
    """Return where it is noted what a folder was that is at this path."""
    return os.path.join(state, _FOLDER, f"{digest(os.fsencode(rootfs))[:32]}{_ENDING}")


def load(path: str) -> Record | None:
    """Return what is noted in a file, None without one; FolderError for a damaged one."""
    try:
        host_files.check_writers(path)
        *lines, torn = host_files.read(path, _LIMIT).split(b"\n")  # of a run that was killed
        del torn
        head, was, *notes = map(json.loads, lines)
        found = Record(path, folder=Identity(**head.pop("folder")), **head, **was)
        if not _is_sound(found):
            raise ValueError("it says something else")
        for note in notes:
            if not any(has_form(note, form) for form in _NOTES):
                raise ValueError("it notes something else")
            if "mount" in note:
                found.mounts.append(Attached(**note["mount"]))
            else:
                found.places[note["place"]]["now"] = note["now"]
    except FileNotFoundError:
        return None
    except (
        OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError
    ) as error:  # fmt: skip
        raise FolderError(
            f"{path}, which says what the folder was, can't be read: {error}",
            "Remove it; unmount what is mounted in the folder yourself",
        ) from None
    return found


def _is_sound(record: Record) -> bool:
    """Tell whether all that is noted has the form that ``save`` writes, with ``before.look``."""
    values = {key: getattr(record, key) for key in _FORM}
    identity = has_form(asdict(record.folder), {"device": int, "inode": int, "born": int | None})
    return identity and has_form(values, _FORM) and all(map(_is_place, record.places))


def _is_place(place: Place) -> bool:
    may = {key: str for key in ("link", "now") if key in place}
    was = place["was"]
    needed = _LINK if was["is"] == "link" else _DATA if "data" in was else {}
    return has_form(place, {**may, "was": needed})


def search(state: str, folder: Identity) -> Record | None:
    """Return what is noted of a folder that was at another path then, None where nothing is."""
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
    """Return the identity in a file, None where it can't be read: it isn't ours to complain."""
    try:
        line = host_files.read_start(path, _FIRST_LINE).partition(b"\n")[0]
        return json.loads(line)["folder"]
    except (OSError, ValueError, KeyError, TypeError):
        return None

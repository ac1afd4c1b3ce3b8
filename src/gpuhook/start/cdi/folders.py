"""The folders of CDI documents: which device each name means, and which files count for nothing.

A later folder wins, device by device. Two files of one folder that name the same device make it
unusable, their other devices stay; a file with errors spoils itself alone. Sources: SPEC.md of
the CDI specification, and the engines' library where that says more.
"""

import os

from gpuhook.ground.host import files as host_files
from gpuhook.ground.oci.jsontext import Record
from gpuhook.start.cdi.reading import MOST_BYTES
from gpuhook.start.inventory.cache import identity

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from gpuhook.start.cdi.reading import Reading

ENDINGS = (".json", ".yaml")
OTHER_ENDING = "engines read names that end in .json or .yaml alone"
SUB_FOLDER = "engines look into no sub-folder"
MISSING = "the folder doesn't exist"


class Device(Record):
    """A device that a name means: its qualified name, its file, and what that says.

    ``document`` is the whole file's, ``edits`` the device's own container edits.
    """

    name: str
    file: str
    document: "dict[str, Any]"
    edits: "dict[str, Any]"


class FileError(Record):
    """Why a file, or a folder, can't be used: ``line`` is None where none is to blame."""

    file: str
    line: int | None
    message: str

    def __str__(self) -> str:
        place = f"{self.file}, line {self.line}" if self.line else self.file
        return f"{place}: {self.message}"


class Ignored(Record):
    """A file that no engine reads, or a folder that isn't there, and why."""

    file: str
    reason: str

    def __str__(self) -> str:
        return f"{self.file}: {self.reason}"


class Found:
    """What a list of folders holds.

    ``folders`` are they; ``devices`` are those that can be used, by name; ``documents`` the good
    files'; ``conflicts`` has the files of each name that a folder has more than once.
    ``identities`` tells of each document which file it was read from.
    """

    def __init__(self) -> None:
        self.folders: list[str] = []
        self.devices: dict[str, Device] = {}
        self.documents: dict[str, dict[str, Any]] = {}
        self.identities: dict[str, tuple[int, ...]] = {}
        self.conflicts: dict[str, list[str]] = {}
        self.errors: list[FileError] = []
        self.ignored: list[Ignored] = []


class Parses:
    """Files as they were read last, for as long as they don't change.

    This is the one place where files are read; ``saved`` has its like for one process after
    the other.
    """

    def __init__(self) -> None:
        # A file's identity when it was read, and what was in it, by path.
        self.known: dict[str, tuple[tuple[int, ...], Reading]] = {}

    def read(self, path: str) -> "Reading":
        """Return what is in a file; OSError for one that can't be read.

        Never waits: a pipe in a file's place is an error. A link is followed, as by engines.
        """
        # Taken before the file is read: if it changes meanwhile, the next look finds it changed.
        stamp = identity(host_files.status_of(path))
        known = self.known.get(path)
        if known is not None and known[0] == stamp:
            return known[1]
        # One byte more than a document may have: its reader says so in its own words.
        data = host_files.read_start(path, MOST_BYTES + 1)
        from gpuhook.start.cdi import document  # noqa: PLC0415 - with a YAML reader, slow to import

        reading = document.read(data)
        self.known[path] = (stamp, reading)
        return reading

    def forget_others(self, paths: "Iterable[str]") -> None:
        """Forget all files but these."""
        kept = set(paths)
        self.known = {path: known for path, known in self.known.items() if path in kept}


def read_folders(folders: "Iterable[str]", parses: Parses | None = None) -> Found:
    """Return what these folders hold, the last one first in rank."""
    parses = parses if parses is not None else Parses()
    found = Found()
    paths = []
    for folder in folders:
        found.folders.append(folder)
        inside: dict[str, list[Device]] = {}
        for path in _paths(folder, found):
            paths.append(path)
            for device in _devices(path, parses, found):
                inside.setdefault(device.name, []).append(device)
        for name, devices in inside.items():
            if len(devices) == 1:
                found.devices[name] = devices[0]
            else:
                found.devices.pop(name, None)
                found.conflicts.setdefault(name, []).extend(device.file for device in devices)
    parses.forget_others(paths)
    return found


def _paths(folder: str, found: Found) -> list[str]:
    """Return the files of a folder that engines read, by name."""
    try:
        with os.scandir(folder) as entries:
            inside = sorted(entries, key=lambda entry: entry.name)
    except FileNotFoundError:
        found.ignored.append(Ignored(folder, MISSING))
        return []
    except (OSError, ValueError) as error:
        found.errors.append(FileError(folder, None, f"the folder {_cause(error)}"))
        return []
    paths = []
    for entry in inside:
        path = os.path.join(folder, entry.name)
        if entry.is_dir(follow_symlinks=False):
            found.ignored.append(Ignored(path, SUB_FOLDER))
        elif not entry.name.endswith(ENDINGS):
            found.ignored.append(Ignored(path, OTHER_ENDING))
        else:
            paths.append(path)
    return paths


def _devices(path: str, parses: Parses, found: Found) -> list[Device]:
    """Return the devices of a file; none, and its errors noted, if it has any."""
    errors, whole = examine(path, parses)
    found.errors += errors
    if whole is None:
        return []
    found.documents[path] = whole
    found.identities[path] = parses.known[path][0]
    kind = whole["kind"]
    return [
        Device(f"{kind}={entry['name']}", path, whole, entry["containerEdits"])
        for entry in whole["devices"]
    ]


def examine(
    path: str, parses: Parses | None = None
) -> "tuple[list[FileError], dict[str, Any] | None]":
    """Return (errors, document) of one file: a document if there are no errors."""
    try:
        reading = (parses or Parses()).read(path)
    except (OSError, ValueError) as error:
        return [FileError(path, None, f"the file {_cause(error)}")], None
    errors = [FileError(path, each.line, each.sentence) for each in reading.problems]
    return errors, reading.document


def _cause(error: "OSError | ValueError") -> str:
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return f"can't be read: {reason}"

"""Folders of CDI specs: the devices that they define, and the files that are ignored.

A later folder overrides an earlier one, device by device. If two files of one folder define the
same device, it is unusable, but their other devices remain. An error in a file affects only that
file. Sources: SPEC.md of the CDI specification, and the engines' library for details.
"""

import os

from gpuhook.base.host import files as host_files
from gpuhook.base.oci.jsontext import Record
from gpuhook.core.cdi.parse_result import MOST_BYTES
from gpuhook.core.inventory.cache import identity

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from gpuhook.core.cdi.parse_result import ParseResult

ENDINGS = (".json", ".yaml")
OTHER_ENDING = "engines read only names that end in .json or .yaml"
SUB_FOLDER = "engines don't read sub-folders"
MISSING = "the folder doesn't exist"


class CdiDevice(Record):
    """A device of a CDI spec, by its qualified name, with the file that defines it.

    ``document`` is the whole CDI spec, ``edits`` the device's own container edits.
    """

    name: str
    file: str
    document: "dict[str, Any]"
    edits: "dict[str, Any]"


class FileError(Record):
    """An error of a file or folder; ``line`` is None if the error has no line."""

    file: str
    line: int | None
    message: str

    def __str__(self) -> str:
        place = f"{self.file}, line {self.line}" if self.line else self.file
        return f"{place}: {self.message}"


class IgnoredFile(Record):
    """A file that engines don't read, or a missing folder, with the reason."""

    file: str
    reason: str

    def __str__(self) -> str:
        return f"{self.file}: {self.reason}"


class FolderContent:
    """Content of a list of folders.

    ``devices`` has the usable devices by name, ``documents`` the valid CDI specs by file.
    ``conflicts`` has, for each name defined twice in a folder, the files. ``identities`` has, for
    each CDI spec, the identity of the file that it was read from.
    """

    def __init__(self) -> None:
        self.folders: list[str] = []
        self.devices: dict[str, CdiDevice] = {}
        self.documents: dict[str, dict[str, Any]] = {}
        self.identities: dict[str, tuple[int, ...]] = {}
        self.conflicts: dict[str, list[str]] = {}
        self.errors: list[FileError] = []
        self.ignored: list[IgnoredFile] = []


class ParseCache:
    """Cache of parsed files, valid while the files don't change.

    All CDI specs are read here; ``saved`` keeps such a cache from one process to the next.
    """

    def __init__(self) -> None:
        # By path: the file's identity when it was read, and its content.
        self.known: dict[str, tuple[tuple[int, ...], ParseResult]] = {}

    def read(self, path: str) -> "ParseResult":
        """Return the content of a file; OSError if it can't be read.

        Never blocks: a pipe in a file's place is an error. Links are followed, as by engines.
        """
        # Taken before the file is read: a change meanwhile is found by the next call.
        stamp = identity(host_files.status_of(path))
        known = self.known.get(path)
        if known is not None and known[0] == stamp:
            return known[1]
        # One byte more than the limit: the reader then reports the size itself.
        data = host_files.read_start(path, MOST_BYTES + 1)
        from gpuhook.core.cdi import document  # noqa: PLC0415 - with a YAML reader, slow to import

        reading = document.read(data)
        self.known[path] = (stamp, reading)
        return reading

    def forget_others(self, paths: "Iterable[str]") -> None:
        """Forget all files but these."""
        kept = set(paths)
        self.known = {path: known for path, known in self.known.items() if path in kept}


def read_folders(folders: "Iterable[str]", parses: ParseCache | None = None) -> FolderContent:
    """Return the content of these folders; the last folder takes precedence."""
    parses = parses if parses is not None else ParseCache()
    found = FolderContent()
    paths = []
    for folder in folders:
        found.folders.append(folder)
        inside: dict[str, list[CdiDevice]] = {}
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


def _paths(folder: str, found: FolderContent) -> list[str]:
    """Return a folder's files that engines read, sorted by name."""
    try:
        with os.scandir(folder) as entries:
            inside = sorted(entries, key=lambda entry: entry.name)
    except FileNotFoundError:
        found.ignored.append(IgnoredFile(folder, MISSING))
        return []
    except (OSError, ValueError) as error:
        found.errors.append(FileError(folder, None, f"the folder {_cause(error)}"))
        return []
    paths = []
    for entry in inside:
        path = os.path.join(folder, entry.name)
        if entry.is_dir(follow_symlinks=False):
            found.ignored.append(IgnoredFile(path, SUB_FOLDER))
        elif not entry.name.endswith(ENDINGS):
            found.ignored.append(IgnoredFile(path, OTHER_ENDING))
        else:
            paths.append(path)
    return paths


def _devices(path: str, parses: ParseCache, found: FolderContent) -> list[CdiDevice]:
    """Return the devices of a file; if it has errors, record these and return none."""
    errors, whole = examine(path, parses)
    found.errors += errors
    if whole is None:
        return []
    found.documents[path] = whole
    found.identities[path] = parses.known[path][0]
    kind = whole["kind"]
    return [
        CdiDevice(f"{kind}={entry['name']}", path, whole, entry["containerEdits"])
        for entry in whole["devices"]
    ]


def examine(
    path: str, parses: ParseCache | None = None
) -> "tuple[list[FileError], dict[str, Any] | None]":
    """Return (errors, CDI spec) of one file; the CDI spec is None if there are errors."""
    try:
        reading = (parses or ParseCache()).read(path)
    except (OSError, ValueError) as error:
        return [FileError(path, None, f"the file {_cause(error)}")], None
    errors = [FileError(path, each.line, each.sentence) for each in reading.problems]
    return errors, reading.document


def _cause(error: "OSError | ValueError") -> str:
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return f"can't be read: {reason}"

"""Reading of engine configurations, and atomic changes to them.

Only ``Change.commit`` writes to an engine's file.
"""

import contextlib
import difflib
import json
import os
import re
from dataclasses import dataclass

from gpuhook.base.errors import EngineError, printable
from gpuhook.base.host import files as host_files
from gpuhook.tools.engines import marks
from gpuhook.tools.engines.merge import Document

DEFAULT_STATE = "/var/lib/gpuhook"  # folder for the records of changes
# The first line of a file of ours, which identifies it even without a record.
DROP_IN_HEADER = "Written by `gpuhook install`; `gpuhook uninstall` takes it back."
_ASIDE = ".edited"  # read by no program: enroot and shells read .sh, others .yaml, .json
_ASIDE_MODE = 0o600
_MOST_ASIDE = 100
_PART = re.compile(r"[^\n\t]+")
_NOT_WRITABLE = (
    "Run this as root; where the system's folders are read-only, name a file elsewhere with "
    "--config, or a writable copy of the system with --prefix"
)


def users_folder(usual: str, variable: str) -> str:
    """Return the folder named by an XDG variable, else the usual folder in the user's home.

    A relative path in the variable is ignored. EngineError if the user has no home.
    """
    found = os.environ.get(variable, "")
    if not os.path.isabs(found):
        found = os.path.join(os.path.expanduser("~"), usual)
    if not os.path.isabs(found):
        raise EngineError(
            "Your home folder is unknown: HOME isn't set, and you have no entry in passwd",
            "Set HOME",
        )
    return found


def read(path: str) -> bytes | None:
    """Return a file's content, None if there is no such file.

    EngineError if it can't be read, UntrustedPathError if the reason is another user's link.
    """
    try:
        return host_files.read(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        host_files.check_way(path)
        raise EngineError(
            f"{path} can't be read: {error.strerror}",
            "Run this as root and check that it is a regular file",
        ) from None


def read_json(path: str) -> Document:
    """Return the JSON object in an engine's file, an empty one if there is no file."""
    try:
        document = json.loads(host_files.read(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def read_text(path: str) -> str | None:
    """Return a file's text without a byte order mark, None if there is no such file."""
    data = read(path)
    return None if data is None else decode(data, path)


def decode(data: bytes, path: str) -> str:
    """Return the text of a file without its byte order mark; EngineError if it isn't UTF-8.

    The mark of another encoding selects that; ``marks.check`` knows which engines read it.
    """
    try:
        return marks.decoded(data)
    except UnicodeDecodeError:
        raise EngineError(
            f"{path} is not UTF-8 text",
            "Correct it and run this again; the file was not changed",
        ) from None


def has_header(data: bytes | None) -> bool:
    """Tell whether a file has our header in its first lines."""
    text = (data or b"").removeprefix(marks.mark_of(data))
    head = text.split(b"\n", 2)[:2]  # a script starts with its interpreter
    return f"# {DROP_IN_HEADER}".encode() in head


def aside(path: str, data: bytes) -> str:
    """Return an unused path next to a file, to keep its content when it is removed."""
    names = (f"{path}{_ASIDE}{number}" for number in ("", *range(2, _MOST_ASIDE)))
    for name in names:
        if not os.path.lexists(name) or (not os.path.islink(name) and read(name) == data):
            return name
    raise EngineError(f"There are too many copies of {path}", f"Remove some: {path}{_ASIDE}*")


@dataclass(frozen=True)
class Change:
    """Current and wanted content of a file; None means no file, or for ``mode`` the current one.

    ``aside`` is a file that keeps the old content with others' edits; "" for none.
    """

    path: str
    old: bytes | None
    new: bytes | None
    mode: int | None = None
    aside: str = ""

    def __bool__(self) -> bool:
        return self.old != self.new

    def diff(self) -> str:
        """Return the change as a unified diff, with control characters except tabs escaped."""
        before, after = (_lines(data) for data in (self.old, self.new))
        names = (
            "/dev/null" if self.old is None else printable(self.path),
            "/dev/null" if self.new is None else printable(self.path),
        )
        text = "".join(difflib.unified_diff(before, after, *names))
        return _PART.sub(lambda found: printable(found[0]), text)  # protects: diff-lines

    def commit(self) -> list[str]:
        """Make the change atomically; return the folders created for it."""
        host_files.check_way(self.path)
        made = []
        try:
            if self.aside and self.old is not None:
                host_files.replace(self.aside, self.old, _ASIDE_MODE)
            if self.new is None:
                os.unlink(self.path)
            elif self:
                made = make_folders(os.path.dirname(self.path))
                host_files.replace(self.path, self.new, self.mode)
            elif self.mode is not None:
                os.chmod(self.path, self.mode)
        except OSError as error:
            remove_folders(made)
            raise EngineError(
                f"{self.path} can't be changed: {error.strerror}",
                host_files.remedy(error, _NOT_WRITABLE),
            ) from None
        return made


def _lines(data: bytes | None) -> list[str]:
    *lines, last = (data or b"").decode("utf-8", "replace").split("\n")
    whole = [f"{line}\n" for line in lines]
    return [*whole, f"{last}\n\\ No newline at end of file\n"] if last else whole


def missing_folders(path: str) -> list[str]:
    """Return a folder and its parents that don't exist, outermost first."""
    missing: list[str] = []
    while path and not os.path.isdir(path):
        missing.insert(0, path)
        path = os.path.dirname(path)
    return missing


def make_folders(path: str) -> list[str]:
    """Create a folder and its missing parents; return those created, outermost first."""
    made = []
    for folder in missing_folders(path):
        with contextlib.suppress(FileExistsError):  # created concurrently, or a dangling link
            os.mkdir(folder, 0o755)
            made.append(folder)
    return made


def remove_folders(paths: list[str]) -> None:
    """Remove folders that we created and that are empty, innermost first."""
    for path in reversed(paths):
        with contextlib.suppress(OSError):
            os.rmdir(path)

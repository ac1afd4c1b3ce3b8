"""Read engine configurations, and show and make a change to one as a whole.

Nothing but ``Change.commit`` writes to a file of an engine.
"""

import contextlib
import difflib
import json
import os
import re
from dataclasses import dataclass

from gpuhook.ground.errors import EngineError, printable
from gpuhook.ground.host import files as host_files
from gpuhook.tools.engines import marks
from gpuhook.tools.engines.merge import Document

DEFAULT_STATE = "/var/lib/gpuhook"  # where it is kept what was changed
# The first line of a file of its own, with which it is known as ours without a record too.
DROP_IN_HEADER = "Written by `gpuhook install`; `gpuhook uninstall` takes it back."
_ASIDE = ".edited"  # no program reads such a name: enroot and shells want .sh, others .yaml, .json
_ASIDE_MODE = 0o600
_MOST_ASIDE = 100
_PART = re.compile(r"[^\n\t]+")
_NOT_WRITABLE = (
    "Run this as root; where the system's folders are read-only, name a file elsewhere with "
    "--config, or a writable copy of the system with --prefix"
)


def users_folder(usual: str, variable: str) -> str:
    """Return the usual folder in the user's home, or that which a variable of XDG's names.

    A relative path doesn't count there. EngineError where he has no home.
    """
    found = os.environ.get(variable, "")
    if not os.path.isabs(found):
        found = os.path.join(os.path.expanduser("~"), usual)
    if not os.path.isabs(found):
        raise EngineError(
            "Your home folder isn't known: HOME names none, and you have no entry in passwd",
            "Set HOME",
        )
    return found


def read(path: str) -> bytes | None:
    """Return a file's content, None where there is no such file.

    EngineError where it can't be read, UntrustedPathError where that is for a stranger's link.
    """
    try:
        return host_files.read(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        host_files.check_way(path)
        raise EngineError(
            f"{path} can't be read: {error.strerror}",
            "Run this as root and check that it is an ordinary file",
        ) from None


def read_json(path: str) -> Document:
    """Return the JSON object in a file of an engine's own, an empty one where there is none."""
    try:
        document = json.loads(host_files.read(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def read_text(path: str) -> str | None:
    """Return a file's text without a byte order mark, None where there is no such file."""
    data = read(path)
    return None if data is None else decode(data, path)


def decode(data: bytes, path: str) -> str:
    """Return the text of a file without its byte order mark; EngineError if it isn't UTF-8.

    With the mark of another encoding it is of that one; ``marks.check`` says which engine reads it.
    """
    try:
        return marks.decoded(data)
    except UnicodeDecodeError:
        raise EngineError(
            f"{path} is not UTF-8 text",
            "Correct it and run this again; the file was left as it is",
        ) from None


def has_header(data: bytes | None) -> bool:
    """Tell whether a file says in its first lines that we wrote it."""
    text = (data or b"").removeprefix(marks.mark_of(data))
    head = text.split(b"\n", 2)[:2]  # a script begins with its interpreter
    return f"# {DROP_IN_HEADER}".encode() in head


def aside(path: str, data: bytes) -> str:
    """Return where a file's content is kept when it goes: beside it, and in nothing's place."""
    names = (f"{path}{_ASIDE}{number}" for number in ("", *range(2, _MOST_ASIDE)))
    for name in names:
        if not os.path.lexists(name) or (not os.path.islink(name) and read(name) == data):
            return name
    raise EngineError(f"Too many copies of {path} are beside it", f"Remove some: {path}{_ASIDE}*")


@dataclass(frozen=True)
class Change:
    """A file as it is and as it is to be; None stands for no file, as a mode for what it has.

    ``aside`` is a file that keeps the old content, with what somebody wrote into it; "" for none.
    """

    path: str
    old: bytes | None
    new: bytes | None
    mode: int | None = None
    aside: str = ""

    def __bool__(self) -> bool:
        return self.old != self.new

    def diff(self) -> str:
        """Return the change as a unified diff; what could steer a terminal is escaped, but tabs."""
        before, after = (_lines(data) for data in (self.old, self.new))
        names = (
            "/dev/null" if self.old is None else printable(self.path),
            "/dev/null" if self.new is None else printable(self.path),
        )
        text = "".join(difflib.unified_diff(before, after, *names))
        return _PART.sub(lambda found: printable(found[0]), text)  # protects: diff-lines

    def commit(self) -> list[str]:
        """Make the change, whole or not at all; return the folders made for it."""
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
    """Return a folder and those above it that aren't there, outermost first."""
    missing: list[str] = []
    while path and not os.path.isdir(path):
        missing.insert(0, path)
        path = os.path.dirname(path)
    return missing


def make_folders(path: str) -> list[str]:
    """Make a folder and the missing ones above it; return those made, outermost first."""
    made = []
    for folder in missing_folders(path):
        with contextlib.suppress(FileExistsError):  # somebody was faster, or it's a dead link
            os.mkdir(folder, 0o755)
            made.append(folder)
    return made


def remove_folders(paths: list[str]) -> None:
    """Remove folders that were made by us and are empty, innermost first."""
    for path in reversed(paths):
        with contextlib.suppress(OSError):
            os.rmdir(path)

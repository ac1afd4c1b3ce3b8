"""Records of gpuhook's changes to engines' files, so that they can be removed exactly.

The state folder has one folder per changed file, named after the file's path:

    record.json   the file's engine, and the settings that are ours
    original      the file before the first change (absent: there was no file)
    written       the file as we last wrote it
    replaced      the previous content, during a write

The record is written before the engine's file and removed after the file is restored, so a crash
loses nothing. record.json is written last and removed first, so a folder without it is a crash's
remains and is ignored. Other users have no access to the folder (``lock``): engines' files may
contain passwords.
"""

import contextlib
import json
import os
import shutil
import urllib.parse
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Protocol

from gpuhook.base import names
from gpuhook.base.errors import EngineError, printable, shown
from gpuhook.base.host import files as host_files
from gpuhook.tools.engines import (
    json_text,
    lock,
    lxc_text,
    made,
    managed,
    marks,
    prefix,
    toml_text,
    unit_text,
    whole_text,
)
from gpuhook.tools.engines.files import (
    Change,
    aside,
    decode,
    has_header,
    missing_folders,
    read,
    remove_folders,
)  # fmt: skip
from gpuhook.tools.engines.lock import FolderLock
from gpuhook.tools.engines.made import MadeFolders
from gpuhook.tools.engines.merge import Document, Path, beside, restored, without_ours

_RECORD = "record.json"
_TEXTS = ("original", "replaced", "written")
_VERSION = "version"
_WHOLE = "whole"
_PATIENCE = 20.0  # seconds; an installation takes less than one
# protects: kept-mode
_MODE = 0o600  # independent of the mode of the engine's file, which its owner can read


class Syntax(Protocol):
    """A configuration syntax, with an editor that keeps the rest of the text."""

    def parse(self, text: str, path: str, /) -> Document:
        """Return the parsed document."""

    def edited(self, text: str, wanted: Document, path: str, /) -> str:
        """Return the text edited to contain the wanted document."""


_SYNTAXES: dict[str, Syntax] = {
    "json": json_text,
    "lxc": lxc_text,
    "toml": toml_text,
    "unit": unit_text,
    _WHOLE: whole_text,
}


@dataclass(frozen=True)
class TargetFile:
    """The wanted state of an engine's file.

    ``syntax`` is json, toml, lxc, unit for systemd, whole for a script. ``owned`` are the paths
    in the document that are always ours, ``released`` those that were ours and are restored.
    ``ours`` is true for a file with only our content, which is removed with it; ``usual`` is the
    usual path of that engine's file of this kind. ``config`` is the engine's main configuration
    file. ``gone`` is true for a file to restore, whatever its ``text``. ``foreign`` are paths that
    belong to others now, even if they were ours. ``sources`` are files whose settings the text
    repeats: a user without access to one of them gets no access to this file. ``mode`` is the
    file's mode, None to keep it.
    """

    engine: str
    path: str
    syntax: str
    text: str
    config: str
    owned: tuple[Path, ...] = ()
    ours: bool = False
    usual: str = ""
    released: tuple[Path, ...] = ()
    gone: bool = False
    foreign: tuple[Path, ...] = ()
    sources: tuple[str, ...] = ()
    mode: int | None = None


@dataclass
class FileRecord:
    """The record of a changed file; earlier versions stored the ``folders`` created for it."""

    engine: str
    path: str
    syntax: str
    config: str
    owned: list[Path] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)


class Store:
    """The records below one state folder, of files below ``root`` if that is used as / ."""

    def __init__(self, folder: str, root: str = "") -> None:
        self.folder = os.path.join(folder, "engines")
        self.made = MadeFolders(folder, root)
        self._prefix = root

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the engines' files against other gpuhook processes.

        EngineError if another process holds the lock for longer than a few seconds.
        """
        state = os.path.dirname(self.folder)
        above = missing_folders(os.path.dirname(state))
        with FolderLock(self.folder, "changing the engines' files", _PATIENCE, EngineError).held():
            above += [path for path in self.made.paths() if state.startswith(f"{path}/")]
            self._clean()
            try:
                yield
            finally:
                used = {*os.listdir(state)} - {os.path.basename(self.folder), made.NAME}
                used |= {*os.listdir(self.folder)} - {lock.NAME}
                self.made.keep_above(state, above, is_used=bool(used))
        if not os.path.lexists(state):
            remove_folders(above)

    def _clean(self) -> None:
        """Remove a crash's remains, and restrict access that earlier versions allowed."""
        for name in os.listdir(self.folder):
            place = os.path.join(self.folder, name)
            if os.path.isdir(place) and not _is_whole(place):
                shutil.rmtree(place)
            elif os.path.isdir(place):
                for file in os.listdir(place):
                    os.chmod(f"{place}/{file}", _MODE)

    def records(self) -> list[FileRecord]:
        """Return all records, sorted by path."""
        try:
            names = sorted(os.listdir(self.folder))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise EngineError(
                f"The state folder {self.folder} can't be read: {error.strerror}",
                "Run this as root, or name another folder with --state-dir",
            ) from None
        host_files.check_way(self.folder)
        places = [os.path.join(self.folder, name) for name in names if name != lock.NAME]
        return [self._load(place) for place in places if _is_whole(place)]

    def _load(self, folder: str) -> FileRecord:
        path = os.path.join(folder, _RECORD)
        try:
            record = FileRecord(**json.loads(host_files.read(path)))
            _check_types(record)
        except (OSError, RecursionError, ValueError, TypeError) as error:
            raise EngineError(
                f"{path} is damaged: {error}",
                f"Compare {folder}/original with the engine's file by hand, then remove {folder}",
            ) from None
        record.owned = [tuple(item) for item in record.owned]
        for each in (record.path, record.config, *record.folders):
            prefix.check_kept(self._prefix, self.folder, each)
        return record

    def _place(self, path: str) -> str:
        return os.path.join(self.folder, urllib.parse.quote(path, safe=""))

    def plan(self, target: TargetFile) -> Change:
        """Return the change of ``apply``; EngineError if it would replace a foreign file."""
        prefix.check_kept(self._prefix, self.folder, target.path)
        host_files.check_way(target.path)
        old = read(target.path)
        if old is None and os.path.islink(target.path):  # protects: dead-links
            leads = printable(os.readlink(target.path))
            raise EngineError(
                f"{target.path} is a link to {leads}, which doesn't exist",
                "Create that file, or remove the link, and run this again",
            )
        if target.ours and old is not None and not _is_whole(self._place(target.path)):
            _check_ours(target, old)
        mode = target.mode if target.mode is not None else host_files.copy_mode(*target.sources)
        new = self._wanted(target, old)
        if new != old:
            managed.check_store(target.engine, target.path)
            managed.check_writable(target.path)
        return Change(target.path, old, new, mode, self._aside(target, old, new))

    def _wanted(self, target: TargetFile, current: bytes | None) -> bytes | None:
        """Return a file's wanted content, None to remove it."""
        is_known = _is_whole(self._place(target.path))
        if not (target.ours or (is_known and (target.gone or target.released))):
            return None if target.gone else marks.encoded(target.text, current)
        before = self._others(target, current)
        if target.gone:
            return before
        text, syntax, path = target.text, _SYNTAXES[target.syntax], target.path
        original = syntax.parse(decode(before or b"", path), path)
        wanted = restored(syntax.parse(text, path), original, target.released)
        if target.ours and before is not None:  # others have added to it
            text, wanted = decode(current or b"", path), beside(wanted, original)
        like = current if before is not None else None
        return marks.encoded(syntax.edited(text, wanted, path), like)

    def _others(self, target: TargetFile, current: bytes | None) -> bytes | None:
        """Return a file without our content, None if nothing else is in it.

        A file of ours without a record may also have content of others.
        """
        if _is_whole(self._place(target.path)):
            return self._rebased(self._record_of(target), current)
        if not target.ours:
            return None if target.syntax == _WHOLE and has_header(current) else current
        if target.syntax == "json":  # a hook file, which is useless in part
            return None
        record = FileRecord(
            target.engine, target.path, target.syntax, target.config, [*target.owned]
        )
        return _separate(record, current, None, target.text.encode("utf-8"))

    def _record_of(self, target: TargetFile) -> FileRecord:
        """Return the record of a target's file, without paths that belong to others now."""
        record = self._load(self._place(target.path))
        record.owned = [path for path in record.owned if path not in target.foreign]
        return record

    def apply(self, target: TargetFile) -> Change:
        """Bring a file into the wanted state and record its original."""
        change = self.plan(target)
        place = self._place(target.path)
        known = _is_whole(place)
        if target.gone:
            return self._remove(change, place)
        original = self._others(target, change.old)
        if not change and not known and original == change.old:
            return change
        if known:
            record = self._record_of(target)
        else:
            record = FileRecord(target.engine, target.path, target.syntax, target.config)
        record.owned = list(dict.fromkeys([*record.owned, *target.owned]))
        try:
            # The edited copy is not ours, also after a crash before this step.
            replaced = None if change.aside else change.old
            self._save(place, record, original, change.new, replaced)
            self.made.expect(os.path.dirname(change.path))
            change.commit()
            record.owned = [path for path in record.owned if path not in target.released]
            self._save(place, record, original, change.new)
        except EngineError:
            if not known:
                if (current := read(change.path)) != change.old:
                    Change(change.path, current, change.old, change.mode).commit()
                self.made.tidy()
                shutil.rmtree(place, ignore_errors=True)
            raise
        return change

    def _texts(self, path: str) -> tuple[bytes | None, bytes | None, bytes | None]:
        """Return the saved texts of a file, in the order of ``_TEXTS``."""
        place = self._place(path)
        original, replaced, written = (read(f"{place}/{name}") for name in _TEXTS)
        return original, replaced, written

    def _aside(
        self, what: TargetFile | FileRecord, current: bytes | None, new: bytes | None
    ) -> str:
        """Return the path for a copy of a file of ours that others have edited, "" if unneeded."""
        if what.syntax != _WHOLE or current is None or current == new:
            return ""
        known = _is_whole(self._place(what.path))
        texts = self._texts(what.path) if known else (None, None, None)
        if current in texts or not _is_edited(current, texts[-1]):
            return ""
        return aside(what.path, current)

    def _rebased(self, record: FileRecord, current: bytes | None) -> bytes | None:
        """Return the file's original updated with others' changes, without ours."""
        original, replaced, written = self._texts(record.path)
        if current is None or current in (original, replaced, written):
            return None if current is None else original
        if record.syntax == _WHOLE:
            return original if _is_edited(current, written) else current
        if replaced is not None:  # a crash happened before or after the write
            current = _separate(record, current, original, replaced)
        return _separate(record, current, original, written)

    def _save(
        self,
        place: str,
        record: FileRecord,
        original: bytes | None,
        new: bytes | None,
        replaced: bytes | None = None,
    ) -> None:
        try:
            os.makedirs(place, exist_ok=True)
            # In this order a crash between two writes leaves a consistent record.
            for name, data in zip(_TEXTS, (original, replaced, new), strict=True):
                if data is not None:
                    host_files.replace(f"{place}/{name}", data, _MODE)
                else:
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(f"{place}/{name}")
            data = json.dumps(asdict(record), indent=2).encode()
            host_files.replace(f"{place}/{_RECORD}", data, _MODE)
        except OSError as error:
            raise EngineError(
                f"The original of {record.path} can't be saved in {place}: {error.strerror}",
                host_files.remedy(
                    error, "Run this as root, or name another folder with --state-dir"
                ),
            ) from None

    def plan_removal(self, record: FileRecord) -> Change:
        """Return the change of ``take_back``."""
        host_files.check_way(record.path)
        current = read(record.path)
        new = self._rebased(record, current)
        return Change(record.path, current, new, aside=self._aside(record, current, new))

    def written(self, record: FileRecord) -> Document:
        """Return the document that we last wrote to a file."""
        data = read(f"{self._place(record.path)}/written")
        return _SYNTAXES[record.syntax].parse(decode(data or b"", record.path), record.path)

    def _remove(self, change: Change, place: str) -> Change:
        if _is_whole(place):
            return self.take_back(self._load(place))
        if change:
            change.commit()
        return change

    def take_back(self, record: FileRecord) -> Change:
        """Remove all our changes to a file, and its record."""
        change = self.plan_removal(record)
        if change:
            change.commit()
        self.made.add(record.folders)
        self.made.tidy()
        place = self._place(record.path)
        os.unlink(f"{place}/{_RECORD}")
        shutil.rmtree(place)
        return change


def _check_types(record: FileRecord) -> None:
    """Raise TypeError for a record with a value of a wrong type."""
    texts: list[object] = [record.engine, record.path, record.syntax, record.config]
    if not isinstance(record.owned, list) or not isinstance(record.folders, list):
        raise TypeError("owned and folders have to be lists")
    for path in record.owned:
        texts += path if isinstance(path, list) else [None]
    if not all(isinstance(text, str) for text in [*texts, *record.folders]):
        raise TypeError("it has a value that isn't a string")
    if record.syntax not in _SYNTAXES:
        raise ValueError(f"{shown(record.syntax)} isn't a syntax of files")


def _is_whole(place: str) -> bool:
    """Tell whether a folder has a complete record."""
    return os.path.lexists(f"{place}/{_RECORD}")


def _check_ours(target: TargetFile, old: bytes) -> None:
    """Refuse to change a file that has no record and doesn't look like ours."""
    if old == target.text.encode("utf-8") or has_header(old):
        return
    if target.syntax == "json" and _is_our_hook(old):
        return
    elsewhere = f", such as {target.usual}," if target.usual not in ("", target.path) else ""
    raise EngineError(
        f"{target.path} exists and is not a file of gpuhook",
        f"Name a new file{elsewhere} or move it away; the file was not changed",
    )


def _is_edited(current: bytes, written: bytes | None) -> bool:
    """Tell whether a file of ours was edited, and not replaced by another file.

    Our files have a header in their first lines, if the syntax allows it.
    """
    return has_header(current) or (written is not None and not has_header(written))


def _is_our_hook(data: bytes) -> bool:
    try:
        path = json.loads(data)["hook"]["path"]
    except (ValueError, TypeError, KeyError):
        return False
    return os.path.basename(str(path)) == names.HOOK  # a hook file has no comments


def _separate(
    record: FileRecord, current: bytes | None, original: bytes | None, written: bytes | None
) -> bytes | None:
    """Remove only our keys from a file that others have changed, too."""
    if current is None:
        return None
    syntax = _SYNTAXES[record.syntax]

    def parsed(data: bytes | None) -> Document:
        return syntax.parse(decode(data or b"", record.path), record.path)

    ours = parsed(written)
    wanted = without_ours(parsed(current), parsed(original), ours, record.owned)
    if wanted and _VERSION in ours and (_VERSION,) not in record.owned:
        wanted.setdefault(_VERSION, ours[_VERSION])  # needed to read the rest
    if not wanted and original is None:
        return None
    text = syntax.edited(decode(current, record.path), wanted, record.path)
    return marks.encoded(text, current)

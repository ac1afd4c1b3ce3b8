"""What gpuhook changed in the engines' files, kept so that it can be taken back exactly.

For every file there is one folder below the state folder, named after the file's path:

    record.json   whose file it is, and what we own in it
    original      the file before the first change (absent: there was no file)
    written       the file as we last wrote it
    replaced      the file as it was before that, while it is written

The record is written before the engine's file and goes after that is as it was, so that a crash
loses nothing; record.json is the last of it to be written and the first to go, so a folder without
one is what a crash let lie, and says nothing. Nobody else may look into that folder (``lock``): the
files of engines may hold passwords.
"""

import contextlib
import json
import os
import shutil
import urllib.parse
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Protocol

from gpuhook.ground import names
from gpuhook.ground.errors import EngineError, printable, shown
from gpuhook.ground.host import files as host_files
from gpuhook.tools.engines import (
    json_text,
    lock,
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
from gpuhook.tools.engines.lock import Lock
from gpuhook.tools.engines.made import MadeFolders
from gpuhook.tools.engines.merge import Document, Path, beside, restored, without_ours

_RECORD = "record.json"
_TEXTS = ("original", "replaced", "written")
_VERSION = "version"
_WHOLE = "whole"
_PATIENCE = 20.0  # seconds; an installation takes less than one
# protects: kept-mode
_MODE = 0o600  # whatever the engine's file has: its owner reads that one


class Syntax(Protocol):
    """A way to write a configuration, with an editor that keeps what it doesn't change."""

    def parse(self, text: str, path: str, /) -> Document:
        """Return the document that a text says."""

    def edited(self, text: str, wanted: Document, path: str, /) -> str:
        """Return the text changed so that it says another document."""


_SYNTAXES: dict[str, Syntax] = {
    "json": json_text,
    "toml": toml_text,
    "unit": unit_text,
    _WHOLE: whole_text,
}


@dataclass(frozen=True)
class Target:
    """A file as an engine wants it.

    ``syntax`` is json or toml, unit for systemd, whole for a script. ``owned`` are the paths in
    the document that are ours whatever stands there, ``released`` those that were and become what
    they are without us. ``ours`` is true for a file that holds nothing but what we write and goes
    with it; ``usual`` is where such a file of that engine usually is. ``config`` is the engine's
    main configuration file. ``gone`` is true for a file that is to be as it is without us,
    whatever its ``text``.
    ``foreign`` are paths that are somebody else's now, even if they were ours before.
    ``sources`` are files whose settings the text repeats: who may not read one of those may not
    read this one. ``mode`` is what the file is to have, None for what it has.
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
class Record:
    """What is remembered of one changed file; earlier versions noted ``folders`` made for it."""

    engine: str
    path: str
    syntax: str
    config: str
    owned: list[Path] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)


class Store:
    """The records below one state folder, of files below ``root`` where that stands for / ."""

    def __init__(self, folder: str, root: str = "") -> None:
        self.folder = os.path.join(folder, "engines")
        self.made = MadeFolders(folder, root)
        self._prefix = root

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep others from changing the engines' files meanwhile.

        EngineError if somebody else does so for longer than a few seconds.
        """
        state = os.path.dirname(self.folder)
        above = missing_folders(os.path.dirname(state))
        with Lock(self.folder, "changing the engines' files", _PATIENCE, EngineError).held():
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
        """Remove what a crash left, and close what earlier versions left open."""
        for name in os.listdir(self.folder):
            place = os.path.join(self.folder, name)
            if os.path.isdir(place) and not _is_whole(place):
                shutil.rmtree(place)
            elif os.path.isdir(place):
                for file in os.listdir(place):
                    os.chmod(f"{place}/{file}", _MODE)

    def records(self) -> list[Record]:
        """Return all records, by path."""
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

    def _load(self, folder: str) -> Record:
        path = os.path.join(folder, _RECORD)
        try:
            record = Record(**json.loads(host_files.read(path)))
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

    def plan(self, target: Target) -> Change:
        """Return what ``apply`` would change; EngineError if it would replace another's file."""
        prefix.check_kept(self._prefix, self.folder, target.path)
        host_files.check_way(target.path)
        old = read(target.path)
        if old is None and os.path.islink(target.path):  # protects: dead-links
            leads = printable(os.readlink(target.path))
            raise EngineError(
                f"{target.path} is a link to {leads}, which isn't there",
                "Make that file, or remove the link, and run this again",
            )
        if target.ours and old is not None and not _is_whole(self._place(target.path)):
            _check_ours(target, old)
        mode = target.mode if target.mode is not None else host_files.copy_mode(*target.sources)
        new = self._wanted(target, old)
        if new != old:
            managed.check_store(target.engine, target.path)
            managed.check_writable(target.path)
        return Change(target.path, old, new, mode, self._aside(target, old, new))

    def _wanted(self, target: Target, current: bytes | None) -> bytes | None:
        """Return a file's wanted content; None where it is to go."""
        is_known = _is_whole(self._place(target.path))
        if not (target.ours or (is_known and (target.gone or target.released))):
            return None if target.gone else marks.encoded(target.text, current)
        before = self._others(target, current)
        if target.gone:
            return before
        text, syntax, path = target.text, _SYNTAXES[target.syntax], target.path
        original = syntax.parse(decode(before or b"", path), path)
        wanted = restored(syntax.parse(text, path), original, target.released)
        if target.ours and before is not None:  # somebody has written more into it
            text, wanted = decode(current or b"", path), beside(wanted, original)
        like = current if before is not None else None
        return marks.encoded(syntax.edited(text, wanted, path), like)

    def _others(self, target: Target, current: bytes | None) -> bytes | None:
        """Return a file without what is ours, None where nothing else was in it.

        One of ours that nothing is remembered of may hold what others wrote, too.
        """
        if _is_whole(self._place(target.path)):
            return self._rebased(self._record_of(target), current)
        if not target.ours:
            return None if target.syntax == _WHOLE and has_header(current) else current
        if target.syntax == "json":  # a hook, of which nobody wants a part
            return None
        record = Record(target.engine, target.path, target.syntax, target.config, [*target.owned])
        return _separate(record, current, None, target.text.encode("utf-8"))

    def _record_of(self, target: Target) -> Record:
        """Return what is remembered of a target's file, without what is somebody else's now."""
        record = self._load(self._place(target.path))
        record.owned = [path for path in record.owned if path not in target.foreign]
        return record

    def apply(self, target: Target) -> Change:
        """Bring a file into the wanted state and remember how it was."""
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
            record = Record(target.engine, target.path, target.syntax, target.config)
        record.owned = list(dict.fromkeys([*record.owned, *target.owned]))
        try:
            # What is put aside is nobody's but who edited it, also after a crash before that.
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
        """Return what is kept of a file, in the order of ``_TEXTS``."""
        place = self._place(path)
        original, replaced, written = (read(f"{place}/{name}") for name in _TEXTS)
        return original, replaced, written

    def _aside(self, what: Target | Record, current: bytes | None, new: bytes | None) -> str:
        """Return where the text of a file that is ours as a whole goes if somebody edited it."""
        if what.syntax != _WHOLE or current is None or current == new:
            return ""
        known = _is_whole(self._place(what.path))
        texts = self._texts(what.path) if known else (None, None, None)
        if current in texts or not _is_edited(current, texts[-1]):
            return ""
        return aside(what.path, current)

    def _rebased(self, record: Record, current: bytes | None) -> bytes | None:
        """Return the original of a file as it is now: with what others changed, without ours."""
        original, replaced, written = self._texts(record.path)
        if current is None or current in (original, replaced, written):
            return None if current is None else original
        if record.syntax == _WHOLE:
            return original if _is_edited(current, written) else current
        if replaced is not None:  # a crash came before or after what was to be written
            current = _separate(record, current, original, replaced)
        return _separate(record, current, original, written)

    def _save(
        self,
        place: str,
        record: Record,
        original: bytes | None,
        new: bytes | None,
        replaced: bytes | None = None,
    ) -> None:
        try:
            os.makedirs(place, exist_ok=True)
            # In this order a crash between two of them leaves what fits together.
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
                f"What {record.path} was can't be saved in {place}: {error.strerror}",
                host_files.remedy(
                    error, "Run this as root, or name another folder with --state-dir"
                ),
            ) from None

    def plan_removal(self, record: Record) -> Change:
        """Return what ``take_back`` would change."""
        host_files.check_way(record.path)
        current = read(record.path)
        new = self._rebased(record, current)
        return Change(record.path, current, new, aside=self._aside(record, current, new))

    def written(self, record: Record) -> Document:
        """Return a file's document as we last wrote it."""
        data = read(f"{self._place(record.path)}/written")
        return _SYNTAXES[record.syntax].parse(decode(data or b"", record.path), record.path)

    def _remove(self, change: Change, place: str) -> Change:
        if _is_whole(place):
            return self.take_back(self._load(place))
        if change:
            change.commit()
        return change

    def take_back(self, record: Record) -> Change:
        """Undo everything that was done to a file, and forget it."""
        change = self.plan_removal(record)
        if change:
            change.commit()
        self.made.add(record.folders)
        self.made.tidy()
        place = self._place(record.path)
        os.unlink(f"{place}/{_RECORD}")
        shutil.rmtree(place)
        return change


def _check_types(record: Record) -> None:
    """Raise TypeError for a record with a value that isn't of its field's type."""
    texts: list[object] = [record.engine, record.path, record.syntax, record.config]
    if not isinstance(record.owned, list) or not isinstance(record.folders, list):
        raise TypeError("owned and folders have to be lists")
    for path in record.owned:
        texts += path if isinstance(path, list) else [None]
    if not all(isinstance(text, str) for text in [*texts, *record.folders]):
        raise TypeError("it holds what is no text")
    if record.syntax not in _SYNTAXES:
        raise ValueError(f"{shown(record.syntax)} is no syntax of a file")


def _is_whole(place: str) -> bool:
    """Tell whether a folder has a record, and not just parts of one."""
    return os.path.lexists(f"{place}/{_RECORD}")


def _check_ours(target: Target, old: bytes) -> None:
    """Refuse to change a file that we don't remember and that doesn't look as if we wrote it."""
    if old == target.text.encode("utf-8") or has_header(old):
        return
    if target.syntax == "json" and _is_our_hook(old):
        return
    elsewhere = f", such as {target.usual}," if target.usual not in ("", target.path) else ""
    raise EngineError(
        f"{target.path} exists and is not gpuhook's",
        f"Name a new file{elsewhere} or move it away; the file was left as it is",
    )


def _is_edited(current: bytes, written: bytes | None) -> bool:
    """Tell whether a file is one of ours as a whole, and not what somebody put in its place.

    Ours say so in their first lines, where they can.
    """
    return has_header(current) or (written is not None and not has_header(written))


def _is_our_hook(data: bytes) -> bool:
    try:
        path = json.loads(data)["hook"]["path"]
    except (ValueError, TypeError, KeyError):
        return False
    return os.path.basename(str(path)) == names.HOOK  # a hook file has no comments


def _separate(
    record: Record, current: bytes | None, original: bytes | None, written: bytes | None
) -> bytes | None:
    """Take only our own keys out of a file that somebody else has changed too."""
    if current is None:
        return None
    syntax = _SYNTAXES[record.syntax]

    def parsed(data: bytes | None) -> Document:
        return syntax.parse(decode(data or b"", record.path), record.path)

    ours = parsed(written)
    wanted = without_ours(parsed(current), parsed(original), ours, record.owned)
    if wanted and _VERSION in ours and (_VERSION,) not in record.owned:
        wanted.setdefault(_VERSION, ours[_VERSION])  # it says how to read the rest
    if not wanted and original is None:
        return None
    text = syntax.edited(decode(current, record.path), wanted, record.path)
    return marks.encoded(text, current)

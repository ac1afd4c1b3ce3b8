"""What is remembered of the CDI documents that ``gpuhook install --cdi`` keeps fresh.

In the state folder, readable for everybody:

    cdi.json          where documents go, and what they are made with (Kept)
    cdi-error.json    why the last refresh failed, an entry for each kind (Failure); no file
                      where it succeeded

Root writes and removes what the first one names, so neither counts that others could have written.
Below a folder that stands for / the first one may have come with an image: what it says has effects
below there alone.
"""

import contextlib
import glob
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, TypeVar, get_origin

from gpuhook.ground.config.loader import PATH_VARIABLE
from gpuhook.ground.errors import CdiError, shown
from gpuhook.ground.host import files as host_files
from gpuhook.tools.cdi.write import FORMATS
from gpuhook.tools.engines import prefix as prefixes
from gpuhook.tools.engines.files import make_folders

_KEPT = "cdi.json"
_FAILURES = "cdi-error.json"
_RUN = "/var/run"
_AGAIN = "Remove that file, and run gpuhook install --cdi again"

T = TypeVar("T")


@dataclass(frozen=True)
class Kept:
    """What ``install --cdi`` has decided.

    ``folder`` is where documents go, ``format`` yaml or json. ``config`` is the configuration
    file that they are made with, None for the usual one; ``engines`` are those that asked for
    documents, ``hook`` the path of gpuhook-cdi-hook, ``units`` the files of systemd and udev
    that were written, and ``made`` the folders that earlier versions made for all this. Where an
    installation has a prefix, no path but ``config`` has it.

    ValueError or TypeError for what none of these can be.
    """

    folder: str
    config: str | None
    format: str
    engines: tuple[str, ...]
    hook: str
    units: tuple[str, ...] = ()
    made: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_types(self)
        for path in (self.folder, self.hook, *self.units, *self.made):
            if not prefixes.is_plain(path):  # protects: kept-paths
                raise ValueError(f"{shown(path)} is no path from / on")
        if self.format not in FORMATS:
            raise ValueError(f"{shown(self.format)} is none of the formats {', '.join(FORMATS)}")

    def below(self, prefix: str) -> "Kept":
        """Return the same with the folder of documents below a folder that stands for / .

        Nothing is known of engines there, because none is run. EngineError where a path leads
        out of there.
        """
        if not prefix:
            return self
        folder = below(prefix, self.folder)
        for path in glob.glob(f"{glob.escape(folder)}/*"):
            prefixes.checked(prefix, path)
        return replace(self, folder=folder, engines=())


def below(prefix: str, path: str) -> str:
    """Return a path of the system below a folder that stands for / .

    /var/run is a link to /run nearly everywhere, which would lead out of that folder.
    """
    if prefix and path.startswith(_RUN) and os.path.islink(prefix.rstrip("/") + _RUN):
        path = path.removeprefix("/var")
    return prefixes.below(prefix, path)


@dataclass(frozen=True)
class Failure:
    """Why a refresh failed: ``time`` is in seconds since 1970, ``kind`` "" where all are meant."""

    time: float
    kind: str
    error: str
    remedy: str

    def __post_init__(self) -> None:
        _check_types(self)


def _check_types(record: Any) -> None:
    """Raise TypeError for a record with a value that isn't of its field's type."""
    for field in fields(record):
        value, kind = getattr(record, field.name), field.type
        if get_origin(kind) is tuple:
            fits = isinstance(value, tuple) and all(isinstance(each, str) for each in value)
        else:
            fits = isinstance(value, kind)  # type: ignore[arg-type]
        if not fits:
            raise TypeError(f"{shown(value)} can't be its {field.name}")


def kept(state: str, prefix: str = "") -> Kept | None:
    """Return what is remembered in a state folder, None where nothing is installed.

    Where the folder is below ``prefix``, it doesn't say with which configuration documents are
    made, and so with which driver: that is this machine's, or what $GPUHOOK_CONFIG names.
    CdiError for a file that is damaged or can't be read, UntrustedPathError for one that
    others than root can have written.
    """
    found = _read(os.path.join(state, _KEPT))
    if found is None:
        return None
    values = found if isinstance(found, dict) else {}
    values = {**values, **_tuples(values, "engines", "units", "made")}
    if prefixes.came_with(prefix, state):  # protects: prefix-configuration
        config = os.environ.get(PATH_VARIABLE)
        values["config"] = config and os.path.abspath(config)
    return _made(Kept, values, state, _KEPT)


def last_errors(state: str) -> list[Failure]:
    """Return why the last refresh failed, nothing if it succeeded; raises as ``kept`` does."""
    found = _read(os.path.join(state, _FAILURES))
    entries = found if isinstance(found, list) else [] if found is None else [found]
    return [_made(Failure, entry, state, _FAILURES) for entry in entries]


def save(state: str, value: Kept) -> None:
    """Remember what ``install --cdi`` has decided; CdiError where that can't be written."""
    _write(os.path.join(state, _KEPT), asdict(value))


def save_errors(state: str, failures: Iterable[Failure]) -> None:
    """Remember why a refresh failed, or that it succeeded; CdiError as for ``save``."""
    entries = [asdict(failure) for failure in failures]
    if entries:
        _write(os.path.join(state, _FAILURES), entries)
    else:
        _remove(os.path.join(state, _FAILURES))


def forget(state: str) -> None:
    """Remove what is remembered; CdiError where that can't be done."""
    for name in (_KEPT, _FAILURES):
        _remove(os.path.join(state, name))


def _tuples(values: dict[str, Any], *names: str) -> dict[str, tuple[Any, ...]]:
    return {name: tuple(values[name]) for name in names if isinstance(values.get(name), list)}


def _made(record: type[T], values: object, state: str, name: str) -> T:
    try:
        return record(**values)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise CdiError(f"{os.path.join(state, name)} is damaged: {error}", _AGAIN) from None


def _read(path: str) -> Any:
    """Return the JSON value in a file, None where there is no such file."""
    try:
        return json.loads(host_files.read_roots(path))  # protects: kept-writers
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise CdiError(f"{path} can't be read: {error.strerror}", "Run this as root") from None
    except (ValueError, RecursionError) as error:
        raise CdiError(f"{path} is damaged: {error}", _AGAIN) from None


def _write(path: str, value: object) -> None:
    try:
        host_files.check_way(path)
        make_folders(os.path.dirname(path))
        host_files.replace(path, json.dumps(value, indent=2).encode() + b"\n", 0o644)
    except OSError as error:
        raise _unusable(path, error) from None


def _remove(path: str) -> None:
    try:
        host_files.check_way(path)
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.unlink(path)
    except OSError as error:
        raise _unusable(path, error) from None


def _unusable(path: str, error: OSError) -> CdiError:
    return CdiError(
        f"{path} can't be changed: {error.strerror}",
        host_files.remedy(error, "Run this as root, or name another folder with --state-dir"),
    )

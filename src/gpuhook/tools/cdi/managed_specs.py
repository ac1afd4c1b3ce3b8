"""Records of the CDI specs that ``gpuhook install --cdi`` manages.

In the state folder, readable by all users:

    cdi.json          the folder of the specs, and the inputs of their generation (ManagedSpecs)
    cdi-error.json    the errors of the last refresh, an entry per kind (RefreshFailure); absent if
                      it succeeded

Root writes and removes files named in the first one, so both are ignored if other users could have
written them. Below a prefix used as / the first one may be part of an image: it then has effects
only below the prefix.
"""

import glob
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, get_origin

from gpuhook.base.config.loader import PATH_VARIABLE
from gpuhook.base.errors import CdiError, shown
from gpuhook.tools.cdi.write import FORMATS
from gpuhook.tools.engines import prefix as prefixes
from gpuhook.tools.engines.state_file import StateFile

_KEPT = "cdi.json"
_FAILURES = "cdi-error.json"
_RUN = "/var/run"
_AGAIN = "Remove that file, and run gpuhook install --engine all --cdi again"


@dataclass(frozen=True)
class ManagedSpecs:
    """The settings recorded by ``install --cdi``.

    ``folder`` is the destination of the specs, ``format`` yaml or json. ``config`` is the
    configuration file for their generation, None for the default one. ``engines`` are those that
    requested CDI, ``hook`` is the path of gpuhook-cdi-hook, ``units`` are the files written for
    systemd and udev, and ``made`` the folders created for all this by earlier versions. In an
    installation with a prefix, only ``config`` includes the prefix.

    ValueError or TypeError for invalid values.
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
                raise ValueError(f"{shown(path)} isn't an absolute path without ..")
        if self.format not in FORMATS:
            raise ValueError(f"{shown(self.format)} isn't one of the formats {', '.join(FORMATS)}")

    def below(self, prefix: str) -> "ManagedSpecs":
        """Return a copy with the folder of specs below a prefix used as / .

        The engines' versions there are unknown, because no program is run. EngineError if a path
        leads out of the prefix.
        """
        if not prefix:
            return self
        folder = below(prefix, self.folder)
        for path in glob.glob(f"{glob.escape(folder)}/*"):
            prefixes.checked(prefix, path)
        return replace(self, folder=folder, engines=())


def below(prefix: str, path: str) -> str:
    """Return a system path below a prefix used as / .

    /var/run is a link to /run on nearly all systems, which would lead out of the prefix.
    """
    if prefix and path.startswith(_RUN) and os.path.islink(prefix.rstrip("/") + _RUN):
        path = path.removeprefix("/var")
    return prefixes.below(prefix, path)


@dataclass(frozen=True)
class RefreshFailure:
    """An error of a refresh: ``time`` is a Unix time, ``kind`` is "" for all kinds."""

    time: float
    kind: str
    error: str
    remedy: str

    def __post_init__(self) -> None:
        _check_types(self)


def _check_types(record: Any) -> None:
    """Raise TypeError for a record with a value of a wrong type."""
    for field in fields(record):
        value, kind = getattr(record, field.name), field.type
        if get_origin(kind) is tuple:
            fits = isinstance(value, tuple) and all(isinstance(each, str) for each in value)
        else:
            fits = isinstance(value, kind)  # type: ignore[arg-type]
        if not fits:
            raise TypeError(f"{shown(value)} can't be its {field.name}")


def kept(state: str, prefix: str = "") -> ManagedSpecs | None:
    """Return the record in a state folder, None if nothing is installed.

    If the folder is below ``prefix``, its configuration file, and so its driver, is ignored: the
    host's is used, or the one named by $GPUHOOK_CONFIG. CdiError for a damaged or unreadable
    file, UntrustedPathError for one that a user other than root can have written.
    """

    def made(found: Any) -> ManagedSpecs:
        values = found if isinstance(found, dict) else {}
        values = {**values, **_tuples(values, "engines", "units", "made")}
        if prefixes.came_with(prefix, state):  # protects: prefix-configuration
            config = os.environ.get(PATH_VARIABLE)
            values["config"] = config and os.path.abspath(config)
        return ManagedSpecs(**values)

    return _file(state, _KEPT).load(made)


def last_errors(state: str) -> list[RefreshFailure]:
    """Return the errors of the last refresh, none if it succeeded; raises as ``kept`` does."""

    def made(found: Any) -> list[RefreshFailure]:
        return [RefreshFailure(**each) for each in (found if isinstance(found, list) else [found])]

    return _file(state, _FAILURES).load(made) or []


def save(state: str, value: ManagedSpecs) -> None:
    """Save the settings of ``install --cdi``; CdiError if they can't be written."""
    _file(state, _KEPT).save(asdict(value))


def save_errors(state: str, failures: Iterable[RefreshFailure]) -> None:
    """Save the errors of a refresh, or that it succeeded; CdiError as for ``save``."""
    entries = [asdict(failure) for failure in failures]
    file = _file(state, _FAILURES)
    if entries:
        file.save(entries)
    else:
        file.remove()


def forget(state: str) -> None:
    """Remove the records; CdiError if that fails."""
    for name in (_KEPT, _FAILURES):
        _file(state, name).remove()


def _file(state: str, name: str) -> StateFile:
    return StateFile(os.path.join(state, name), CdiError, _AGAIN, mode=0o644)


def _tuples(values: dict[str, Any], *names: str) -> dict[str, tuple[Any, ...]]:
    return {name: tuple(values[name]) for name in names if isinstance(values.get(name), list)}

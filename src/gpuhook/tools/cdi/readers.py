"""Detection of the engine with the oldest CDI support, for which specs are written.

An engine refuses a whole file of an unknown version. So a field that only newer engines support
would take all devices from an old one.
"""

import functools
from collections.abc import Callable, Iterable

from gpuhook.core.cdi import versions
from gpuhook.core.cdi.generate import Reader
from gpuhook.tools.engines import installed


def oldest(engines: Iterable[str] = tuple(versions.ENGINES)) -> Callable[[], Reader | None]:
    """Return a function that finds the engine with the oldest CDI support, for ``Source``.

    It runs each engine's program once, which takes a twentieth of a second.
    """
    return functools.cache(functools.partial(_oldest, tuple(engines)))


def _oldest(engines: tuple[str, ...]) -> Reader | None:
    found = []
    for engine in engines:
        version = installed.version(engine)
        highest = versions.highest(engine, version) if version else None
        if highest is not None:
            found.append(Reader(f"{engine} {version}", highest))
    return min(found, key=lambda reader: versions.order(reader.highest), default=None)

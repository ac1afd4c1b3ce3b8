"""Which engine of this machine reads the fewest of CDI's versions: documents are written for it.

A reader refuses a whole file of a version that it doesn't know, so one old engine would lose all
devices by a field that only newer ones know.
"""

import functools
from collections.abc import Callable, Iterable

from gpuhook.start.cdi import versions
from gpuhook.start.cdi.generate import Reader
from gpuhook.tools.engines import installed


def oldest(engines: Iterable[str] = tuple(versions.ENGINES)) -> Callable[[], Reader | None]:
    """Return what finds the engine that takes the lowest versions, as ``Source`` wants it.

    It asks each engine's program, which takes a twentieth of a second, and does so once.
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

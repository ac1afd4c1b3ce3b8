"""Which engine of this machine reads the fewest of CDI's versions: documents are written for it.

A reader refuses a whole file of a version that it doesn't know, so one old engine would lose all
devices by a field that only newer ones know.
"""

from collections.abc import Iterable

from gpuhook.start.cdi import versions
from gpuhook.start.cdi.generate import Reader
from gpuhook.tools.engines import installed


def oldest(engines: Iterable[str] = tuple(versions.ENGINES)) -> Reader | None:
    """Return the engine that takes the lowest versions; None where none is here that knows CDI."""
    found = []
    for engine in engines:
        version = installed.version(engine)
        highest = versions.highest(engine, version) if version else None
        if highest is not None:
            found.append(Reader(f"{engine} {version}", highest))
    return min(found, key=lambda reader: versions.order(reader.highest), default=None)

"""CDI specs as YAML or JSON text for the oldest engine, and their atomic replacement.

An engine refuses a whole file of an unknown version. So a field that only newer engines support
would take all devices from an old one.
"""

import functools
import json
import os
from collections.abc import Callable, Iterable

from gpuhook.base.errors import CdiError
from gpuhook.base.host import files as host_files
from gpuhook.core.cdi import versions
from gpuhook.core.cdi.generate import CdiReader
from gpuhook.core.cdi.names import file_stem, split_kind
from gpuhook.tools.engines import installed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

FORMATS = ("yaml", "json")
MODE = 0o644  # rootless engines read it, too


def to_text(document: "dict[str, Any]", form: str) -> str:
    """Return a spec as text; ``form`` is yaml or json."""
    if form == "json":
        return json.dumps(document, indent=4) + "\n"
    # PyYAML takes 10 ms and some memory, and most callers write no YAML.
    from gpuhook.tools.cdi.yaml_text import to_yaml  # noqa: PLC0415

    return to_yaml(document)


def file_name(kind: str, form: str) -> str:
    """Return the file name of a spec of a kind: vendor-class.yaml."""
    return f"{file_stem(*split_kind(kind))}.{form}"


def write(path: str, text: str, mode: int = MODE) -> bool:
    """Write a spec for engines; return whether the file changed.

    A file with the same content isn't rewritten, so that no engine reads all folders again.
    Otherwise it is replaced atomically by a temporary file in the same folder: engines watch the
    folder, and don't notice a file moved there from another one. CdiError, with the old file
    unchanged, if that fails.
    """
    data = text.encode()
    try:
        host_files.check_way(path)
        host_files.check_owner(path)
        if read_old(path) == data and os.stat(path).st_mode & 0o777 == mode:
            return False
        os.makedirs(os.path.dirname(path) or ".", mode=0o755, exist_ok=True)
        host_files.replace(path, data, mode)  # protects: document-whole
    except OSError as error:
        raise CdiError(
            f"{path} can't be written: {error.strerror}; its old content is unchanged",
            host_files.remedy(error, "Run this as root, and check that the disk is writable"),
        ) from None
    return True


def read_old(path: str) -> bytes | None:
    """Return a file's content, None if there is none to compare."""
    try:
        return host_files.read(path)
    except OSError:
        return None


def oldest_reader(
    engines: Iterable[str] = tuple(versions.ENGINES),
) -> Callable[[], CdiReader | None]:
    """Return a function that finds the engine with the oldest CDI support, for ``SpecSource``.

    It runs each engine's program once, which takes a twentieth of a second.
    """
    return functools.cache(functools.partial(_oldest, tuple(engines)))


def _oldest(engines: tuple[str, ...]) -> CdiReader | None:
    found = []
    for engine in engines:
        version = installed.version(engine)
        highest = versions.highest(engine, version) if version else None
        if highest is not None:
            found.append(CdiReader(f"{engine} {version}", highest))
    return min(found, key=lambda reader: versions.order(reader.highest), default=None)

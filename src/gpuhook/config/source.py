"""A configuration file's text, and the text as nested tables.

tomllib, which is slow to import, is imported only for text that the plain reader leaves to it.
"""

import os
import stat

from gpuhook.config import plain_toml
from gpuhook.errors import ConfigError, shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

SIZE_LIMIT = 1 << 18  # bytes; the commented default has less than 5 % of it
_CHUNK = 1 << 14  # bytes read at once: memory that is too much costs more than a second read
_DOTS_LIMIT = 64  # in a line's key; tomllib takes the square of their number in time
_KEY_LIMIT = 256  # characters of a dotted key; no known one is half as long


def read_text(path: str) -> str:
    """Return a configuration file's text; FileNotFoundError, or ConfigError if unreadable."""
    try:
        return _read_bytes(path).decode("utf-8")
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(
            f"The configuration file {shown(path)} can't be read: {reason}",
            "Make it a readable file of UTF-8 text",
        ) from None


def _read_bytes(path: str) -> bytes:
    # O_NONBLOCK: a FIFO put in the place of the file must not make a container start wait.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        mode = os.fstat(fd).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISCHR(mode)):
            raise ValueError("it is not a regular file")
        data = b""
        while len(data) <= SIZE_LIMIT and (chunk := os.read(fd, _CHUNK)):
            data += chunk
        if len(data) > SIZE_LIMIT:
            raise ValueError(f"it is larger than {SIZE_LIMIT} bytes")
        return data
    finally:
        os.close(fd)


def parse(text: str, path: str | None = None) -> "dict[str, Any]":
    """Return TOML text as nested dicts; ConfigError, with the line, if it isn't TOML."""
    plain = plain_toml.read(text)
    if plain is not None:
        return plain
    import tomllib  # noqa: PLC0415

    try:
        if any(line.partition("=")[0].count(".") > _DOTS_LIMIT for line in text.split("\n")):
            raise ValueError("a key has too many parts")
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        end = f"at the end, line {text.count(chr(10)) + 1}"
        problem = str(error).replace("at end of document", end)
        raise ConfigError(
            f"{path or 'The configuration'} is not valid TOML: {problem}",
            "Correct it; `gpuhook config validate` checks it again",
        ) from None


def flatten(table: "dict[str, Any]", whole: "tuple[str, ...]" = ()) -> dict[str, object]:
    """Return the values of nested tables under dotted keys; the keys in ``whole`` stay tables.

    A name that has a dot in it is put in quotes, because it is one name and no path of two.
    """
    leaves: dict[str, object] = {}
    pending = [("", table)]
    while pending:
        prefix, table = pending.pop()
        for name, value in table.items():
            key = prefix + (f'"{name}"' if "." in name else name)
            if isinstance(value, dict) and key not in whole and len(key) < _KEY_LIMIT:
                pending.append((key + ".", value))
            else:
                leaves[key] = value
    return leaves

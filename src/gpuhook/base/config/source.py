"""A configuration file's text, and the text as nested tables.

tomllib, which takes 15 ms to import, is imported only if the plain reader declines the text. The
plain reader handles a typical config.toml: comments, [headers], [[headers]] of tables in a list,
and ``key = value`` lines with bare keys. A value is true, false, a decimal number, a one-line
string without escapes, or a one-line list of such strings. Its result is the same as tomllib's,
or none.
"""

import os
import stat

from gpuhook.base.errors import ConfigError, shown
from gpuhook.base.fileio import read_start

# Types of values, in words.
BOOL = "true or false"
STRING = "a string"
LIST = "a list of strings"
SECONDS = "a number of seconds above 0"
PAUSE = "a number of seconds, or 0"
NUMBER = "a whole number"

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

UTF_8_MARK = b"\xef\xbb\xbf"
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")
MAX_BYTES = 1 << 18  # bytes; the commented default has less than 5 % of it
_MAX_DOTS = 64  # in a line's key; tomllib's time is quadratic in their number
_MAX_KEY = 256  # characters of a dotted key; no known one is half as long
_BARE = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_")
_DIGITS = 9  # of a number; longer ones are left to tomllib
_DEPTH = 8  # of a table; no real one is so deep


def read_text(path: str) -> str:
    """Return a configuration file's text; FileNotFoundError, or ConfigError if unreadable.

    A UTF-8 byte order mark is removed, as by NVIDIA's programs.
    """
    try:
        data = _read_bytes(path)
        if data[:2] in _UTF_16:
            raise ValueError("it begins with a byte order mark of UTF-16")
        return data.removeprefix(UTF_8_MARK).decode("utf-8")
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(
            f"The configuration file {shown(path)} can't be read: {reason}",
            "Make it a readable file of UTF-8 text",
        ) from None


def _read_bytes(path: str) -> bytes:
    # O_NONBLOCK: a FIFO in place of the file must not block a container start.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        mode = os.fstat(fd).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISCHR(mode)):
            raise ValueError("it is not a regular file")
        data = read_start(fd, MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ValueError(f"it is larger than {MAX_BYTES} bytes")
        return data
    finally:
        os.close(fd)


def parse(text: str, path: str | None = None) -> "dict[str, Any]":
    """Return TOML text as nested dicts; ConfigError, with the line, if it isn't TOML."""
    plain = read_plain(text)
    if plain is not None:
        return plain
    import tomllib  # noqa: PLC0415

    try:
        if any(line.partition("=")[0].count(".") > _MAX_DOTS for line in text.split("\n")):
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

    A name that contains a dot is quoted, because it is one name and not a path of two.
    """
    leaves: dict[str, object] = {}
    pending = [("", table)]
    while pending:
        prefix, table = pending.pop()
        for name, value in table.items():
            key = prefix + (f'"{name}"' if "." in name else name)
            if isinstance(value, dict) and key not in whole and len(key) < _MAX_KEY:
                pending.append((key + ".", value))
            else:
                leaves[key] = value
    return leaves


# The plain reader ------------------------------------------------------------------------------


class _NotPlainError(Exception):
    """The text needs the full parser."""


def read_plain(text: str) -> "dict[str, Any] | None":
    """Return what tomllib.loads returns for ``text``, or None for text that is not plain."""
    root: dict[str, Any] = {}
    table = root
    headers: set[str] = set()
    lists: set[str] = set()
    try:
        for line in text.split("\n"):
            if not line.replace("\t", " ").isprintable():
                return None
            content = line.strip()
            if not content or content[0] == "#":
                continue
            if content.startswith("[["):
                table = _table_in_list(root, content, lists)
            elif content[0] == "[":
                table = _table(root, content, headers)
            else:
                _assign(table, content)
    except _NotPlainError:
        return None
    return root


def _table(root: "dict[str, Any]", header: str, headers: set[str]) -> "dict[str, Any]":
    """Return the table that a [header] line opens."""
    name = header[1:-1]
    if header[-1] != "]" or name in headers or name.count(".") >= _DEPTH:
        raise _NotPlainError
    headers.add(name)
    return _enter(root, name.split("."))


def _enter(table: "dict[str, Any]", parts: list[str]) -> "dict[str, Any]":
    """Return the table inside another one, created if missing."""
    for part in parts:
        if not part or not _BARE.issuperset(part):
            raise _NotPlainError
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise _NotPlainError
    return table


def _table_in_list(root: "dict[str, Any]", header: str, lists: set[str]) -> "dict[str, Any]":
    """Return the table that a [[header]] line adds to a list."""
    name = header[2:-2]
    if not header.endswith("]]") or name.count(".") >= _DEPTH:
        raise _NotPlainError
    *parts, last = name.split(".")
    table = _enter(root, parts)
    if not last or not _BARE.issuperset(last) or (last in table) != (name in lists):
        raise _NotPlainError
    lists.add(name)
    made: dict[str, Any] = {}
    table.setdefault(last, []).append(made)
    return made


def _assign(table: "dict[str, Any]", content: str) -> None:
    key, equals, rest = content.partition("=")
    key = key.rstrip()
    if not equals or not key or not _BARE.issuperset(key) or key in table:
        raise _NotPlainError
    value, rest = _value(rest.lstrip())
    _refuse_rest(rest)
    table[key] = value


def _refuse_rest(rest: str) -> None:
    rest = rest.lstrip()
    if rest and rest[0] != "#":
        raise _NotPlainError


def _value(text: str) -> "tuple[Any, str]":
    """Return (value, rest of the text)."""
    first = text[:1]
    if first in ('"', "'"):
        return _string(text, first)
    if first == "[":
        return _strings(text[1:].lstrip())
    word, comment, _ = text.partition("#")
    word = word.rstrip()
    if word in ("true", "false"):
        return word == "true", comment
    return _number(word), comment


def _string(text: str, quote: str) -> tuple[str, str]:
    end = text.find(quote, 1)
    body = text[1:end]
    if end < 0 or "\\" in body or text.startswith(quote * 3):
        raise _NotPlainError
    return body, text[end + 1 :]


def _strings(text: str) -> tuple[list[str], str]:
    values = []
    while text[:1] != "]":
        if text[:1] not in ('"', "'"):
            raise _NotPlainError
        value, text = _string(text, text[0])
        values.append(value)
        text = text.lstrip()
        if text[:1] == ",":
            text = text[1:].lstrip()
        elif text[:1] != "]":
            raise _NotPlainError
    return values, text[1:]


def _number(word: str) -> int | float:
    whole, dot, fraction = word.partition(".")
    for digits in (whole, fraction) if dot else (whole,):
        if not (digits.isascii() and digits.isdecimal() and len(digits) <= _DIGITS):
            raise _NotPlainError
    if whole[0] == "0" and whole != "0":
        raise _NotPlainError
    return float(word) if dot else int(word)

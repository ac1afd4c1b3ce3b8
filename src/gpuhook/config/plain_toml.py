"""Read the plain TOML that a config.toml usually is, because importing tomllib costs 15 ms.

Understood are comments, [headers], [[headers]] of tables in a list, and ``key = value`` lines
with bare keys, where a value is true, false, a decimal number, a string on one line without
escapes, or a list of such strings on one line. Anything else, and anything wrong, is left to
tomllib: this reader never gives another answer than tomllib, only none.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_BARE = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_")
_DIGITS = 9  # of a number; longer ones are tomllib's
_DEPTH = 8  # of a table; no real one is so deep


class _NotPlainError(Exception):
    """The text needs the full parser."""


def read(text: str) -> "dict[str, Any] | None":
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
    """Return the table inside another one, made where there is none."""
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
    """Return (value, what follows it)."""
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

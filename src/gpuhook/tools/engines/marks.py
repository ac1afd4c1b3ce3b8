"""Byte order marks at the start of engines' files, and the engines that read such a file.

Seen with Docker 20.10, 26.1 and 28.5, containerd 1.6, 1.7 and 2.1, podman 4.3 and 5.4. CRI-O reads
TOML with podman's library. Sources: moby's pull request 44790; go-toml's 253, which its version 2
lacks; BurntSushi/toml's 381.
"""

import codecs
from collections.abc import Callable

from gpuhook.base.errors import EngineError
from gpuhook.core.cdi.versions import order

UTF8, UTF16, UTF32 = "UTF-8", "UTF-16", "UTF-32"
# The longer ones first: the mark of UTF-16 is a prefix of one of UTF-32.
_MARKS = {
    codecs.BOM_UTF32_LE: (UTF32, "utf-32-le"),
    codecs.BOM_UTF32_BE: (UTF32, "utf-32-be"),
    codecs.BOM_UTF8: (UTF8, "utf-8"),
    codecs.BOM_UTF16_LE: (UTF16, "utf-16-le"),
    codecs.BOM_UTF16_BE: (UTF16, "utf-16-be"),
}
_NONE = ("", "utf-8")
# Engine -> encoding -> (first version, version after the last) that reads a file with that mark.
_ALWAYS, _FROM_THEN_ON = "0", "9999"
_READS = {
    "docker": {UTF8: ("23.0", _FROM_THEN_ON), UTF16: ("23.0", _FROM_THEN_ON)},
    "containerd": {UTF8: (_ALWAYS, "2.0")},
    "podman": {UTF8: ("4.6", _FROM_THEN_ON)},
    "crio": {UTF8: ("1.28", _FROM_THEN_ON)},
}
_TITLES = {"docker": "Docker", "crio": "CRI-O"}


def mark_of(data: bytes | None) -> bytes:
    """Return a file's byte order mark, b"" if it has none."""
    return next((mark for mark in _MARKS if (data or b"").startswith(mark)), b"")


def decoded(data: bytes) -> str:
    """Return the text of a file without its mark; UnicodeDecodeError if it isn't text."""
    mark = mark_of(data)
    return data[len(mark) :].decode(_MARKS.get(mark, _NONE)[1])


def encoded(text: str, like: bytes | None) -> bytes:
    """Return a text in the encoding of an existing file, with that file's mark."""
    mark = mark_of(like)
    return mark + text.encode(_MARKS.get(mark, _NONE)[1])


def problem(engine: str, data: bytes | None, version: Callable[[], str | None]) -> str:
    """Return the reason why an engine can't read a file with its mark, "" if it may read it.

    ``version`` is called only if there is a mark; it returns None if the version is unknown.
    """
    name = _MARKS.get(mark_of(data), _NONE)[0]
    if not name:
        return ""
    title = _TITLES.get(engine, engine)
    span = _READS[engine].get(name)
    if span is None:
        return f"starts with a byte order mark of {name}, which {title} doesn't read"
    found = version()
    if found is None or order(span[0]) <= order(found) < order(span[1]):
        return ""
    when = f"from {span[0]} on" if span[0] != _ALWAYS else f"only before {span[1]}"
    said = f"starts with a byte order mark of {name}, which {title} reads {when}"
    return f"{said}, and this is {found}"


def check(engine: str, path: str, data: bytes | None, version: Callable[[], str | None]) -> None:
    """Raise EngineError for a file that an engine can't read because of its mark."""
    why = problem(engine, data, version)
    if why:
        raise EngineError(
            f"{path} {why}",
            "Save it as UTF-8 without a byte order mark, and run this again; "
            "the file was not changed",
        )

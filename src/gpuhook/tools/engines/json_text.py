"""Editor of hand-written JSON files that keeps the order of keys and the indentation."""

import json
import re
from typing import Any

from gpuhook.base.errors import EngineError
from gpuhook.tools.engines.merge import Document, steps

_DEFAULT_INDENT = "    "
_FIRST_MEMBER = re.compile(r'\s*\{[ \t]*(\r?\n)([ \t]+)"')
_END = re.compile(r"\s*\Z")


def parse(text: str, path: str) -> Document:
    """Return the parsed object, empty for an empty file; EngineError if it isn't an object."""
    if not text.strip():
        return {}
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise EngineError(
            f"{path} is not valid JSON: {error}",
            "Correct it and run this again; the file was not changed",
        ) from None
    if not isinstance(document, dict):
        raise EngineError(
            f"{path} isn't a JSON object",
            "Correct it and run this again; the file was not changed",
        )
    return document


def render(document: Document) -> str:
    """Return an object as the text of a new file."""
    return json.dumps(document, indent=_DEFAULT_INDENT, ensure_ascii=False) + "\n"


def edited(text: str, wanted: Document, path: str) -> str:
    """Return ``text`` edited to contain ``wanted``; unchanged if it already does."""
    if not text.strip():
        return render(wanted)
    if not [*steps(parse(text, path), wanted)]:
        return text
    first, end = _FIRST_MEMBER.match(text), _END.search(text)
    newline, indent = first.groups() if first else ("\n", _DEFAULT_INDENT)
    is_one_line = "\n" not in text.strip() and text.strip().strip("{} \t")
    try:
        json.loads(text, object_pairs_hook=_unique)
        made = json.dumps(
            wanted,
            indent=None if is_one_line else indent,
            ensure_ascii=text.isascii(),
            allow_nan=False,
        )
        made.encode("utf-8")
    except ValueError as error:
        raise EngineError(
            f"{path} can't be edited without changing other parts: {error}",
            "Correct that and run this again; the file was not changed",
        ) from None
    return made.replace("\n", newline) + (end[0] if end else "")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the members of an object; ValueError for a duplicate key."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {json.dumps(twice)} is in one object twice")
    return found

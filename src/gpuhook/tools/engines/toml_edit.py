"""Edits of a TOML text that leave the rest unchanged."""

import contextlib
import re
import tomllib
from typing import Any

import toml
import tomlkit
from tomlkit.exceptions import TOMLKitError
from tomlkit.items import Array, InlineTable

from gpuhook.tools.engines.merge import Document, Path, steps

ERRORS = (TOMLKitError, TypeError, AttributeError)  # raised for a part that can't be edited
_VERSION_LINE = re.compile(r"^[ \t]*version[ \t]*=[^\n]*\n", re.MULTILINE)
_TABLE_LINE = re.compile(r"^[ \t]*\[", re.MULTILINE)


def new(document: Document) -> str:
    """Return a document as text."""
    with contextlib.suppress(TypeError, LookupError, ValueError):  # not every list, nor every key
        text: str = toml.dumps(document)
        if tomllib.loads(text) == document:
            return text
    return tomlkit.dumps(document)


def edited(text: str, before: Document, wanted: Document) -> str:
    """Return ``text``, whose document is ``before``, edited step by step; one of ``ERRORS``."""
    for step in steps(before, wanted):
        text = _remove(text, step.path) if step.remove else _set(text, step.path, step.value)
    return text


def _set(text: str, path: Path, value: Any) -> str:
    document = tomlkit.parse(text)
    if len(path) == 1 and path[0] not in document and not isinstance(value, dict):
        return _insert_line(text, path[0], value)
    node: Any = document
    for key in path[:-1]:
        if key not in node:
            node[key] = {} if isinstance(node, InlineTable) else tomlkit.table(is_super_table=True)
        node = node[key]
    old = node.get(path[-1])
    if isinstance(old, Array) and isinstance(value, list):
        _change_array(old, value)
    if not isinstance(old, Array) or old.unwrap() != value:  # or the order differs
        node[path[-1]] = value
    return tomlkit.dumps(document)


def _insert_line(text: str, key: str, value: Any) -> str:
    """Add a top-level key below ``version``, else as the first line."""
    line = f"{key} = {tomlkit.item(value).as_string()}\n"
    table = _TABLE_LINE.search(text)
    version = _VERSION_LINE.search(text, 0, table.start() if table else len(text))
    at = version.end() if version else 0
    return text[:at] + line + text[at:]


def _change_array(array: Array, wanted: list[Any]) -> None:
    """Set an array to ``wanted``, keeping comments and line breaks between the other elements."""
    for position in range(len(array) - 1, -1, -1):
        if array.unwrap()[position] not in wanted:
            del array[position]
    for item in wanted[len(array) :]:
        array.append(item)


def _remove(text: str, path: Path) -> str:
    document = tomlkit.parse(text)
    node: Any = document
    for key in path[:-1]:
        node = node[key]
    del node[path[-1]]
    return tomlkit.dumps(document)

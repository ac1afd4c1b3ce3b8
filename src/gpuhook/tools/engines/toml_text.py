"""Edit a TOML file that a person keeps: comments, order and layout stay.

The text is changed only where the document changes; it is parsed again afterwards and has
to say exactly what was wanted.
"""

import re
import tomllib
from typing import Any

import toml
import tomlkit
from tomlkit.exceptions import TOMLKitError
from tomlkit.items import Array, InlineTable

from gpuhook.ground.errors import EngineError
from gpuhook.tools.engines.merge import Document, Path, steps

_VERSION_LINE = re.compile(r"^[ \t]*version[ \t]*=[^\n]*\n", re.MULTILINE)
_TABLE_LINE = re.compile(r"^[ \t]*\[", re.MULTILINE)


def parse(text: str, path: str) -> Document:
    """Return the document; EngineError if the text is no TOML."""
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise EngineError(
            f"{path} is not valid TOML: {error}",
            "Correct it and run this again; the file was left as it is",
        ) from None


def render(document: Document, header: str) -> str:
    """Return a document as the text of a new file, with comment lines before it."""
    text = toml.dumps(document)
    if tomllib.loads(text) != document:  # it can't write every list
        text = tomlkit.dumps(document)
    comments = "".join(f"# {line}\n" for line in header.split("\n"))
    return f"{comments}\n{text}"


def edited(text: str, wanted: Document, path: str) -> str:
    """Return ``text`` changed so that it says ``wanted``."""
    try:
        for step in steps(parse(text, path), wanted):
            text = _remove(text, step.path) if step.remove else _set(text, step.path, step.value)
    except (TOMLKitError, TypeError, AttributeError) as error:
        raise _refusal(path, str(error)) from error
    if parse(text, path) != wanted:
        raise _refusal(path, "its tables are written in several places")
    return text


def _refusal(path: str, why: str) -> EngineError:
    return EngineError(
        f"{path} can't be edited without changing other parts: {why}",
        "Write each of its tables once, in one place, and run this again; "
        "the file was left as it is",
    )


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
    if not isinstance(old, Array) or old.unwrap() != value:  # or the order is another
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
    """Make an array say ``wanted``, keeping the comments and line breaks between the rest."""
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

"""Edit a JSON file that a person keeps: order, indentation and everything else stay.

The text is changed only where the document changes; it is parsed again afterwards and has
to say exactly what was wanted.
"""

import json
import re
from typing import Any

from gpuhook.ground.errors import EngineError
from gpuhook.tools.engines.merge import Document, Path, steps

_DEFAULT_INDENT = "    "
_BLANKS = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder()


class _Member:
    """One member of an object: its key, and where key and value stand in the text."""

    def __init__(self, key: str, start: int, value: int, end: int) -> None:
        self.key = key
        self.start = start
        self.value = value
        self.end = end


def parse(text: str, path: str) -> Document:
    """Return the document; an empty file is an empty object. EngineError if it is no object."""
    if not text.strip():
        return {}
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise EngineError(
            f"{path} is not valid JSON: {error}",
            "Correct it and run this again; the file was left as it is",
        ) from None
    if not isinstance(document, dict):
        raise EngineError(
            f"{path} holds no JSON object",
            "Correct it and run this again; the file was left as it is",
        )
    return document


def render(document: Document) -> str:
    """Return a document as the text of a new file."""
    return json.dumps(document, indent=_DEFAULT_INDENT, ensure_ascii=False) + "\n"


def edited(text: str, wanted: Document, path: str) -> str:
    """Return ``text`` changed so that it says ``wanted``."""
    if not text.strip():
        return render(wanted)
    for step in steps(parse(text, path), wanted):
        text = _remove(text, step.path) if step.remove else _set(text, step.path, step.value)
    if parse(text, path) != wanted:
        raise EngineError(
            f"{path} can't be edited without changing more than is meant",
            "Remove duplicate keys from it and run this again; the file was left as it is",
        )
    return text


def _skip(text: str, at: int) -> int:
    match = _BLANKS.match(text, at)
    return match.end() if match else at


def _members(text: str, at: int) -> list[_Member]:
    """Return the members of the object whose brace stands at ``at``."""
    found = []
    at = _skip(text, at + 1)
    while text[at] != "}":
        key, end = _DECODER.raw_decode(text, at)
        value = _skip(text, _skip(text, end) + 1)
        _, end = _DECODER.raw_decode(text, value)
        found.append(_Member(key, at, value, end))
        at = _skip(text, end)
        if text[at] == ",":
            at = _skip(text, at + 1)
    return found


def _find(members: list[_Member], key: str) -> int | None:
    """Return the position of the member that counts: of several, the last."""
    for position in range(len(members) - 1, -1, -1):
        if members[position].key == key:
            return position
    return None


def _set(text: str, path: Path, value: Any) -> str:
    at = _skip(text, 0)
    for depth, key in enumerate(path):
        members = _members(text, at)
        position = _find(members, key)
        if position is None:
            for outer in reversed(path[depth + 1 :]):
                value = {outer: value}
            return _insert(text, at, members, key, value)
        member = members[position]
        at = member.value
    return text[: member.value] + _dump(text, value, member.start) + text[member.end :]


def _insert(text: str, brace: int, members: list[_Member], key: str, value: Any) -> str:
    """Add a member at the end of an object, laid out as its siblings are."""
    name = json.dumps(key, ensure_ascii=False)
    if members:
        last = members[-1]
        gap = _gap_before(text, last.start)
        inline = "\n" not in gap
        put = json.dumps(value, ensure_ascii=False) if inline else _dump(text, value, last.start)
        between = ", " if inline else "," + gap
        return f"{text[: last.end]}{between}{name}: {put}{text[last.end :]}"
    newline, indent = _newline(text), _line_indent(text, brace)
    inner = indent + _unit(text)
    lines = json.dumps(value, indent=_unit(text), ensure_ascii=False)
    put = lines.replace("\n", newline + inner)
    end = text.index("}", brace)
    return f"{text[: brace + 1]}{newline}{inner}{name}: {put}{newline}{indent}{text[end:]}"


def _dump(text: str, value: Any, member_start: int) -> str:
    """Return a value for a member, its further lines indented below the member's."""
    if "\n" not in _gap_before(text, member_start):
        return json.dumps(value, ensure_ascii=False)
    lines = json.dumps(value, indent=_unit(text), ensure_ascii=False)
    return lines.replace("\n", _newline(text) + _line_indent(text, member_start))


def _remove(text: str, path: Path) -> str:
    """Take a member out with its comma and its line."""
    at = _skip(text, 0)
    for key in path[:-1]:
        members = _members(text, at)
        position = _find(members, key)
        if position is None:
            return text
        at = members[position].value
    while True:
        members = _members(text, at)
        position = _find(members, path[-1])
        if position is None:
            return text
        text = _cut(text, at, members, position)


def _cut(text: str, brace: int, members: list[_Member], position: int) -> str:
    member = members[position]
    if position > 0:
        return text[: members[position - 1].end] + text[member.end :]
    if len(members) > 1:
        return text[: member.start] + text[members[1].start :]
    return text[: brace + 1] + text[_skip(text, member.end) :]


def _gap_before(text: str, at: int) -> str:
    """Return the blanks directly before a place."""
    start = at
    while start > 0 and text[start - 1] in " \t\r\n":
        start -= 1
    gap = text[start:at]
    newline = gap.rfind("\n")
    if newline < 0:
        return gap
    return gap[newline - 1 :] if gap[newline - 1 : newline] == "\r" else gap[newline:]


def _line_indent(text: str, at: int) -> str:
    """Return the blanks at the beginning of the line on which a place is."""
    start = text.rfind("\n", 0, at) + 1
    end = start
    while text[end] in " \t":
        end += 1
    return text[start:end]


def _unit(text: str) -> str:
    """Return one level of indentation: what stands before the first member of the whole."""
    members = _members(text, _skip(text, 0))
    gap = _gap_before(text, members[0].start) if members else ""
    return gap.lstrip("\r\n") if "\n" in gap and gap.strip("\r\n") else _DEFAULT_INDENT


def _newline(text: str) -> str:
    return "\r\n" if "\r\n" in text else "\n"

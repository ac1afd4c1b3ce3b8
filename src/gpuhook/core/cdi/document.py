"""Reader of CDI specs: parses and checks a file's bytes as the engines' library does.

The result is plain data as in JSON, its fields spelled as in ``FIELDS``. A field that holds null
counts as absent. One error makes engines refuse the whole file.
"""

import math
import struct

from gpuhook.base.errors import shown
from gpuhook.base.oci import jsontext
from gpuhook.core.cdi import checks, yaml_reader
from gpuhook.core.cdi.parse_result import ParseResult, Problem

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from gpuhook.core.cdi.checks import Path
    from gpuhook.core.cdi.yaml_reader import YamlNode

TEXT, SIGNED, UNSIGNED, FLAG = "a string", "a whole number", "a number of 32 bits", "true or false"
_RANGES = {SIGNED: (-(1 << 63), 1 << 63), UNSIGNED: (0, 1 << 32)}
_WHOLE_FLOAT = 1 << 53  # up to here, 1e3 and 5.0 are exact whole numbers

_EDITS: "dict[str, Any]" = {
    "env": [TEXT],
    "deviceNodes": [
        {
            "path": TEXT,
            "hostPath": TEXT,
            "type": TEXT,
            "major": SIGNED,
            "minor": SIGNED,
            "fileMode": UNSIGNED,
            "permissions": TEXT,
            "uid": UNSIGNED,
            "gid": UNSIGNED,
        }
    ],
    "netDevices": [{"hostInterfaceName": TEXT, "name": TEXT}],
    "hooks": [{"hookName": TEXT, "path": TEXT, "args": [TEXT], "env": [TEXT], "timeout": SIGNED}],
    "mounts": [{"hostPath": TEXT, "containerPath": TEXT, "options": [TEXT], "type": TEXT}],
    "intelRdt": {
        "closID": TEXT,
        "l3CacheSchema": TEXT,
        "memBwSchema": TEXT,
        "schemata": [TEXT],
        "enableMonitoring": FLAG,
    },
    "additionalGids": [UNSIGNED],
}
_ANY_NAME = "*"  # a table with arbitrary keys
# The fields of a CDI spec: a list has the one kind of its items, a table its fields.
FIELDS: "dict[str, Any]" = {
    "cdiVersion": TEXT,
    "kind": TEXT,
    "annotations": {_ANY_NAME: TEXT},
    "devices": [{"name": TEXT, "annotations": {_ANY_NAME: TEXT}, "containerEdits": _EDITS}],
    "containerEdits": _EDITS,
}


def read(data: bytes) -> ParseResult:
    """Return the CDI spec in a file's content, or all its errors with their lines."""
    reader = _Reader()
    document = None
    try:
        root = yaml_reader.read(data)
        if root is not None:
            document = reader.value(root, FIELDS, ())
        if document is not None:
            reader.check(document)
        elif not reader.problems:
            reader.problems.append(Problem(None, "the file is empty"))
    except yaml_reader.TreeError as error:
        reader.problems.append(Problem(error.line, error.sentence))
    if reader.problems:
        return ParseResult(None, tuple(sorted(reader.problems, key=lambda each: each.line or 0)))
    return ParseResult(document)


class _Reader:
    """Converter from nodes to a CDI spec, driven by the table of fields.

    ``problems`` collects the errors, ``lines`` has the line of each value by its path. ``lost``
    has the paths of unusable values, and ``around`` the paths that contain these.
    """

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.lines: dict[Path, int] = {}
        self.lost: set[Path] = set()
        self.around: set[Path] = set()
        self.count = 0

    def check(self, document: "dict[str, Any]") -> None:
        """Add the library's errors, except those that follow from an unusable value."""
        for path, sentence in checks.problems(document):
            ways = _ways(path)
            if path not in self.around and self.lost.isdisjoint(ways):
                line = next(self.lines[way] for way in ways if way in self.lines)
                self.problems.append(Problem(line, sentence))

    def wrong(self, node: "YamlNode", sentence: str, path: "Path") -> None:
        self.problems.append(Problem(node.line, sentence))
        self.lost.add(path)
        self.around.update(_ways(path))

    def visit(self, node: "YamlNode") -> None:
        """Count a value: aliases can expand to very many, so they are limited as well."""
        self.count += 1
        if self.count > yaml_reader.MOST_VALUES:
            raise yaml_reader.TreeError(
                node.line, f"the file has more than {yaml_reader.MOST_VALUES} values"
            )

    def value(self, node: "YamlNode", kind: "Any", path: "Path") -> "Any":
        """Return a value in its field's type, None if it is null or unusable."""
        self.visit(node)
        self.lines[path] = node.line
        if node.is_table and isinstance(kind, dict):
            return self.table(node, kind, path)
        if node.is_list and isinstance(kind, list):
            return self.list_(node, kind[0], path)
        value = self.scalar(node, path)
        if value is None and node.is_scalar:
            return None
        found = _fitting(value, kind)
        if found is None:
            there = shown(node.text) if node.is_scalar else node.kind
            wanted = _KINDS.get(type(kind), kind)
            self.wrong(node, f"{spelled(path)} must be {wanted}, not {there}", path)
        elif kind == TEXT and "\0" in found:  # protects: document-nul
            self.wrong(node, f"{spelled(path)} has a NUL character, where C's texts end", path)
            return None
        return found

    def scalar(self, node: "YamlNode", path: "Path") -> "yaml_reader.Scalar":
        try:
            return yaml_reader.scalar(node)
        except yaml_reader.TreeError as error:
            self.wrong(node, error.sentence, path)
            return None

    def list_(self, node: "YamlNode", kind: "Any", path: "Path") -> "list[Any]":
        """Return a list; a null item becomes an empty item of its kind, as in Go."""
        values = [self.value(item, kind, (*path, place)) for place, item in enumerate(node.items)]
        empty: Any = {} if isinstance(kind, dict) else "" if kind == TEXT else 0
        return [empty if value is None else value for value in values]

    def table(self, node: "YamlNode", fields: "dict[str, Any]", path: "Path") -> "dict[str, Any]":
        """Return a table with field names spelled as in ``fields``, in any case in the file."""
        any_name = fields.get(_ANY_NAME)
        folded = {jsontext.folded(name): name for name in fields}
        found: dict[str, Any] = {}
        for key, item in self.pairs(node, path):
            text = self.key(key, path)
            if text is None:
                continue
            place = (*path, text)
            name = text if any_name else folded.get(jsontext.folded(text))
            if name is None:
                self.wrong(key, f"{spelled(place)} isn't a field that CDI knows", place)
            elif name in found:
                self.wrong(key, f"{spelled((*path, name))} comes twice", (*path, name))
            else:
                found[name] = self.value(item, any_name or fields[name], (*path, name))
        if any_name:
            return {name: "" if value is None else value for name, value in found.items()}
        return {name: value for name, value in found.items() if value is not None}

    def pairs(
        self, node: "YamlNode", path: "Path", level: int = 0
    ) -> "Iterator[tuple[YamlNode, YamlNode]]":
        """Yield keys and values, including those that << merges."""
        self.visit(node)
        if level > yaml_reader.MOST_LEVELS:
            raise yaml_reader.TreeError(
                node.line, f"<< is nested deeper than {yaml_reader.MOST_LEVELS} levels"
            )
        for key, value in zip(node.items[::2], node.items[1::2], strict=True):
            self.visit(key)
            if not (key.text == "<<" and key.plain):
                yield key, value
                continue
            for each in value.items if value.is_list else [value]:
                if each.is_table:
                    yield from self.pairs(each, path, level + 1)
                else:
                    sentence = "<< must be followed by a table, or a list of tables"
                    self.wrong(each, sentence, path)

    def key(self, node: "YamlNode", path: "Path") -> str | None:
        value = self.scalar(node, path)
        if value is None:
            self.wrong(node, "the name of a field is missing", path)
            return None
        if isinstance(value, float) and not math.isfinite(value):
            return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
        return _text(value)


def _ways(path: "Path") -> "list[Path]":
    """Return a path and all its prefixes, the longest first."""
    return [path[:end] for end in range(len(path), -1, -1)]


_KINDS: "dict[type, str]" = {dict: "a table", list: "a list"}


def _fitting(value: "yaml_reader.Scalar", kind: "Any") -> "Any":
    """Return a scalar as a field of a kind needs it, None if it doesn't fit."""
    if value is None or not isinstance(kind, str):
        return None
    if kind == TEXT:
        return _text(value)
    if kind == FLAG:
        return value if isinstance(value, bool) else None
    if isinstance(value, (str, bool)):
        return None
    if isinstance(value, float) and not (value.is_integer() and abs(value) <= _WHOLE_FLOAT):
        return None
    low, end = _RANGES[kind]
    return int(value) if low <= value < end else None


def _text(value: "str | bool | float") -> str:
    """Return a scalar as a string, written as Go writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return _float_text(value) if isinstance(value, float) else str(value)


def _float_text(value: float) -> str:
    """Return the shortest digits that identify a 32-bit float."""
    short = _single(value)
    if not math.isfinite(short):
        return "NaN" if math.isnan(short) else "+Inf" if short > 0 else "-Inf"
    texts = (f"{short:.{digits}e}" for digits in range(9))
    text = next(text for text in texts if _single(float(text)) == short)
    mantissa, _, exponent = text.partition("e")
    power = int(exponent)
    if not -5 < power < 6:
        return f"{mantissa}e{power:+03d}"
    decimals = len(mantissa.partition(".")[2]) - power
    return f"{float(text):.{max(decimals, 0)}f}"


def _single(value: float) -> float:
    """Return the 32-bit float nearest to a 64-bit one."""
    try:
        found: float = struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)
    return found


def spelled(path: "Path") -> str:
    """Return a path in a CDI spec in readable form: devices[0].name."""
    return "".join(map(_step, path)).removeprefix(".") or "the document"


def _step(part: str | int) -> str:
    if isinstance(part, str) and part.isidentifier() and part.isascii():
        return f".{part}"
    return f"[{part if isinstance(part, int) else shown(part)}]"

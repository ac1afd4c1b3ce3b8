"""Reader of YAML and JSON as the engines' Go reader takes them, in bounded time, with lines.

That reader is go-yaml 2 below sigs.k8s.io/yaml: scalars mean what they mean in YAML 1.1, except
for base 60 and dates. A repeated key is an error, and only the first document of a stream counts.
PyYAML provides the events; their meaning is decided here, because PyYAML's constructors decide
differently, without lines and without bounds.
"""

import base64
import binascii
import math
import re
import sys

try:
    import yaml
except ModuleNotFoundError:  # in a system package, whose programs start without site-packages
    _LIBRARY = f"{sys.prefix}/{sys.platlibdir}/python{sys.version_info[0]}.{sys.version_info[1]}"
    sys.path += ["/usr/lib/python3/dist-packages", f"{_LIBRARY}/site-packages"]
    import yaml

from gpuhook.core.cdi.parse_result import MOST_BYTES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    Scalar = str | int | float | bool | None

MOST_LEVELS = 50  # of nesting; a CDI spec has eight
MOST_VALUES = 250_000  # in one file, including repetitions by aliases
_MOST_DIRECTIVES = 16  # lines that begin with %; libyaml compares each with all before it
# In UTF-8, after any YAML 1.1 line break.
_DIRECTIVE = re.compile(rb"(?:\A|\A\xef\xbb\xbf|[\r\n]|\xc2\x85|\xe2\x80[\xa8\xa9])%")
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")

# libyaml if PyYAML was built with it: go-yaml was translated from it.
LOADER: "type[yaml.SafeLoader | yaml.CSafeLoader]" = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_CORE = "tag:yaml.org,2002:"
_WORDS: "dict[str, Scalar]" = {
    **dict.fromkeys(("y", "Y", "yes", "Yes", "YES", "on", "On", "ON"), True),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("n", "N", "no", "No", "NO", "off", "Off", "OFF"), False),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), float("nan")),
    **dict.fromkeys((".inf", ".Inf", ".INF", "+.inf", "+.Inf", "+.INF"), float("inf")),
    **dict.fromkeys(("-.inf", "-.Inf", "-.INF"), float("-inf")),
}
_INTEGER = re.compile(r"[-+]?(?:0[xX][0-9a-fA-F]+|0[bB][01]+|0[oO]?[0-7]+|0|[1-9][0-9]*)", re.ASCII)
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", re.ASCII)
_MAX_NUMBER = 100  # characters; 64 bits have fewer in every base
_TYPES: "dict[str, tuple[type, ...]]" = {
    "bool": (bool,),
    "int": (int,),
    "float": (float, int),
    "null": (type(None),),
}
_SURROGATE = re.compile("[\ud800-\udfff]")


class TreeError(Exception):
    """An unreadable text: its line (None if unknown), and the reason."""

    def __init__(self, line: int | None, sentence: str) -> None:
        super().__init__(line, sentence)
        self.line = line
        self.sentence = sentence


class YamlNode:
    """A value in a text: a scalar, a list or a table, and the line where it begins.

    ``text`` is a scalar's text, None for the others, and ``tag`` its tag, if any. ``plain`` means
    without quotes. ``items`` are a list's items, or a table's keys and values alternately.
    ``whole`` is False until the end is read.
    """

    __slots__ = ("is_table", "items", "line", "plain", "tag", "text", "whole")

    def __init__(self, line: int, text: str | None = None, tag: str = "") -> None:
        self.line = line
        self.text = text
        self.tag = tag
        self.plain = False
        self.is_table = False
        self.items: list[YamlNode] = []
        self.whole = text is not None

    @property
    def is_scalar(self) -> bool:
        """True for a single value."""
        return self.text is not None

    @property
    def is_list(self) -> bool:
        """True for a list."""
        return self.text is None and not self.is_table

    @property
    def kind(self) -> str:
        """The kind in words, for messages."""
        return "a single value" if self.is_scalar else "a table" if self.is_table else "a list"


def read(data: bytes) -> YamlNode | None:
    """Return the first document of a text, None if there is none; TreeError if unreadable."""
    if len(data) > MOST_BYTES:
        raise TreeError(None, f"the file is larger than {MOST_BYTES >> 20} MiB")
    if _directives(data) > _MOST_DIRECTIVES:  # protects: few-directives
        raise TreeError(None, f"the file has more than {_MOST_DIRECTIVES} lines that begin with %")
    try:
        return _Builder().build(yaml.parse(data, Loader=LOADER))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark is not None else None
        raise TreeError(line, f"the file is neither YAML nor JSON: {error.problem}") from None
    except yaml.reader.ReaderError as error:
        line = data.count(b"\n", 0, error.position) + 1
        raise TreeError(
            line, f"the file has a character that YAML doesn't allow: {error.reason}"
        ) from None
    except (ValueError, OverflowError):  # from an escape such as \UFFFFFFFF
        raise TreeError(None, "the file has a character that doesn't exist") from None


def _directives(data: bytes) -> int:
    """Return the possible number of directives: for UTF-16, the number of % as an upper bound."""
    count = data.count(b"%")
    if count <= _MOST_DIRECTIVES or data.startswith(_UTF_16):
        return count
    return len(_DIRECTIVE.findall(data))


class _Builder:
    """Builder of nodes from a parser's events, without recursion."""

    def __init__(self) -> None:
        self.open: list[YamlNode] = []
        self.anchors: dict[str, YamlNode] = {}
        self.count = 0

    def build(self, events: "Iterator[yaml.Event]") -> YamlNode | None:
        root = None
        for event in events:
            if isinstance(event, yaml.DocumentEndEvent):
                break
            if isinstance(event, (yaml.SequenceEndEvent, yaml.MappingEndEvent)):
                self.open.pop().whole = True
            elif isinstance(event, yaml.NodeEvent):
                node = self.node(event)
                root = root or node
                if self.open:
                    self.open[-1].items.append(node)
                if not node.whole:
                    self.open.append(node)
        return root

    def node(self, event: yaml.NodeEvent) -> YamlNode:
        line = event.start_mark.line + 1 if event.start_mark is not None else 1
        self.count += 1
        if self.count > MOST_VALUES:
            raise TreeError(line, f"the file has more than {MOST_VALUES} values")
        if isinstance(event, yaml.AliasEvent):
            return self.alias(event.anchor or "", line)
        if isinstance(event, yaml.ScalarEvent):
            node = YamlNode(line, event.value, event.tag or "")
            node.plain = event.implicit[0]
            if _SURROGATE.search(event.value):
                raise TreeError(line, "the file has half a character, as \\ud83d in JSON is")
        else:
            node = YamlNode(line)
            node.is_table = isinstance(event, yaml.MappingStartEvent)
            if len(self.open) >= MOST_LEVELS:
                raise TreeError(line, f"the file is nested deeper than {MOST_LEVELS} levels")
        if event.anchor:
            self.anchors[event.anchor] = node
        return node

    def alias(self, anchor: str, line: int) -> YamlNode:
        node = self.anchors.get(anchor)
        if node is None:
            raise TreeError(line, f"*{anchor} refers to nothing above it")
        if not node.whole:
            raise TreeError(line, f"*{anchor} is inside itself")
        return node


# Values of nodes ------------------------------------------------------------------------------


def scalar(node: YamlNode) -> "Scalar":
    """Return the value of a scalar, None for null; TreeError if its tag doesn't fit.

    None for a list or a table.
    """
    if node.text is None:
        return None
    text = node.text
    if not node.tag:
        return _resolved(text) if node.plain else text
    tag = node.tag.removeprefix(_CORE) if node.tag.startswith(_CORE) else ""
    if tag == "binary":
        return _decoded(node)
    if tag not in _TYPES:
        return text
    value = _resolved(text)
    if type(value) not in _TYPES[tag]:
        raise TreeError(node.line, f"!!{tag} doesn't fit its value")
    return float(value) if tag == "float" and isinstance(value, int) else value


def _decoded(node: YamlNode) -> str:
    try:
        return base64.b64decode("".join((node.text or "").split()), validate=True).decode()
    except (binascii.Error, ValueError):
        raise TreeError(node.line, "!!binary isn't followed by text in base 64") from None


def _resolved(text: str) -> "Scalar":
    """Return the value of a text without quotes."""
    if text in _WORDS:
        return _WORDS[text]
    # Go drops each _ in a number that begins with a digit or a sign.
    plain = text if text[:1] in "._" else text.replace("_", "")
    if len(plain) > _MAX_NUMBER:
        return text
    if _INTEGER.fullmatch(plain):
        octal = plain.lstrip("+-")[0] == "0" and plain.lstrip("+-").isdigit()
        value = int(plain, 8 if octal else 0)
        if -(1 << 63) <= value < 1 << 64:
            return value
    if _FLOAT.fullmatch(plain):
        number = float(plain)
        return text if math.isinf(number) else number
    return text

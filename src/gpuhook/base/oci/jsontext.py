"""JSON at the speed of the C scanner, and edits that keep every other byte unchanged.

``loads`` reads; ``append_to_list`` and similar functions change a JSON *text*: the position is
found by scanning and only that part is rewritten, so unknown fields, number formats,
duplicate keys and key order all survive. ``Record`` is plain data that converts to JSON.

Of the standard library only the C accelerator ``_json`` is imported, because the ``json``
package costs one interpreter start, most of it for ``re``. If an interpreter lacks it,
``json``'s own scanner is used.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any, ClassVar, NoReturn, Self, dataclass_transform
else:

    def dataclass_transform() -> "Callable[[type], type]":
        """Return a decorator without effect: it informs type checkers."""
        return lambda record: record


_BLANKS = " \t\n\r"


def _exact_int(text: str) -> "int | float":
    """Read an integer of any length; Python refuses to convert more than 4300 digits."""
    try:
        return int(text)
    except ValueError:
        return float(text)


def _no_constant(text: str) -> "NoReturn":
    """Refuse NaN and Infinity, which Python's scanner accepts and JSON doesn't have."""
    raise ValueError(f"{text} is not JSON")


class _Settings:
    """Context of the C scanner (see json.decoder.JSONDecoder)."""

    strict = False  # Go's decoder, which reads the same file, accepts control characters
    object_hook = None
    object_pairs_hook = None
    parse_float = float
    parse_int = staticmethod(_exact_int)
    parse_constant = staticmethod(_no_constant)

    def __init__(self) -> None:
        self.memo: dict[str, str] = {}


try:
    from _json import encode_basestring_ascii as _encode_string
    from _json import make_scanner, scanstring

    _scan: "Callable[[str, int], tuple[Any, int]]" = make_scanner(_Settings())  # type: ignore[arg-type]
    _scan_string: "Callable[[str, int, bool], tuple[str, int]]" = scanstring
except ImportError:
    import json.decoder as _decoder
    import json.encoder as _encoder

    _scan = _decoder.JSONDecoder(  # type: ignore[attr-defined]
        strict=False, parse_int=_exact_int, parse_constant=_no_constant
    ).scan_once
    _scan_string = _decoder.scanstring  # type: ignore[attr-defined]
    _encode_string = _encoder.encode_basestring_ascii


def loads(text: str) -> "Any":
    """Read one JSON value; ValueError names the error and its position."""
    value, end = _value(text, _skip(text, 0))
    end = _skip(text, end)
    if end != len(text):
        raise ValueError(f"unexpected text at character {end}")
    return value


def _value(text: str, start: int) -> "tuple[Any, int]":
    try:
        try:
            return _scan(text, start)
        except SystemError:
            _load_errors()
            return _scan(text, start)
    except StopIteration as stop:
        raise ValueError(f"a JSON value is missing at character {stop.value}") from None
    except RecursionError:  # protects: deep-json
        raise ValueError("nested too deep") from None


def folded(name: str) -> str:
    """Return an object's key folded for comparison, as in Go's encoding/json."""
    return name.replace("\u017f", "s").lower()


def field(table: "dict[str, Any]", name: str) -> "Any":
    """Return the value of the key that Go's encoding/json matches to ``name``, None without one.

    Of several spellings the last counts.
    """
    found = [value for key, value in table.items() if folded(key) == folded(name)]
    return found[-1] if found else None


def surely_broken(text: str) -> bool:
    """Tell whether no low-level runtime's parser accepts a text: Go's, yajl or json-c.

    They differ in further things that they accept: comments, 'a', 01, NaN, TRUE, a trailing comma,
    text after the value. All refuse a text that ends too early, also at a NUL, which ends it for C
    parsers. All refuse invalid UTF-8 outside of strings, and a letter in place of a name. They
    refuse a letter in place of a value, unless null, true, false or Infinity begin with it.
    """
    import json.decoder  # noqa: PLC0415 - slow, and only for a text that was refused

    try:
        json.decoder.JSONDecoder(strict=False).raw_decode(text, _skip(text, 0))
    except json.decoder.JSONDecodeError as error:
        letter = text[error.pos : error.pos + 1]
        if not text[error.pos :].strip(_BLANKS) or error.msg.startswith("Unterminated string"):
            return True
        if letter == "\0" or "\udc80" <= letter <= "\udcff":
            return True
        name, value = (error.msg.startswith(f"Expecting {what}") for what in ("property", "value"))
        is_letter = letter.isascii() and letter.isalpha()
        # protects: might-take
        return is_letter and (name or (value and letter.lower() not in "ntfi"))
    except RecursionError:  # protects: deep-json
        pass
    return False


def _string(text: str, start: int) -> tuple[str, int]:
    """Read the string whose quotation mark is before ``start``."""
    try:
        return _scan_string(text, start, False)
    except SystemError:
        _load_errors()
        return _scan_string(text, start, False)


def _load_errors() -> None:
    """Load the module in which the C scanner looks up its error class.

    Until it is imported, the scanner fails with a SystemError instead.
    """
    import json.decoder  # noqa: F401, PLC0415 - slow, and only needed for an error message


def _skip(text: str, index: int) -> int:
    size = len(text)
    while index < size and text[index] in _BLANKS:
        index += 1
    return index


def members(text: str, start: int) -> "Iterator[tuple[str, Any, int, int]]":
    """Walk the object that begins at ``start``: key, value, and the value's position in the text.

    ValueError if the text isn't a JSON object.
    """
    index = _skip(text, start)
    if text[index : index + 1] != "{":
        raise ValueError(f"an object is missing at character {index}")
    index = _skip(text, index + 1)
    if text[index : index + 1] == "}":
        return
    while True:
        if text[index : index + 1] != '"':
            raise ValueError(f"a name is missing at character {index}")
        key, index = _string(text, index + 1)
        index = _skip(text, index)
        if text[index : index + 1] != ":":
            raise ValueError(f"a colon is missing at character {index}")
        begin = _skip(text, index + 1)
        value, end = _value(text, begin)
        yield key, value, begin, end
        index = _skip(text, end)
        if text[index : index + 1] == "}":
            return
        if text[index : index + 1] != ",":
            raise ValueError(f"a comma is missing at character {index}")
        index = _skip(text, index + 1)


def _find(text: str, start: int, key: str) -> "tuple[Any, int, int] | None":
    """Return value and position of a member; of duplicates the last, as in every decoder."""
    found = None
    for name, value, begin, end in members(text, start):
        if name == key:
            found = value, begin, end
    return found


def append_to_list(text: str, path: tuple[str, ...], items: list[str]) -> str:
    """Append JSON texts to the list at ``path`` (object keys from the top).

    Missing or null objects on the path, and a missing or null list, are created. ValueError
    if another value than an object or a list is there.
    """
    addition = ",".join(items)
    start = _skip(text, 0)
    for depth, key in enumerate(path):
        last = depth == len(path) - 1
        found = _find(text, start, key)
        if found is None:
            return _add_member(text, start, key, _nested(path[depth + 1 :], addition))
        value, begin, end = found
        if value is None:
            return text[:begin] + _nested(path[depth + 1 :], addition) + text[end:]
        if not isinstance(value, list if last else dict):
            kind = "a list" if last else "an object"
            raise ValueError(f"{'.'.join(path[: depth + 1])} is not {kind}")  # noqa: TRY004
        if last:
            separator = "," if value else ""
            return text[: end - 1] + separator + addition + text[end - 1 :]
        start = begin
    raise ValueError("the path is empty")


def _nested(path: tuple[str, ...], addition: str) -> str:
    return _within(path, f"[{addition}]")


def _within(path: tuple[str, ...], text: str) -> str:
    """Return objects around a JSON text, one for each key."""
    for key in reversed(path):
        text = "{" + quote(key) + ":" + text + "}"
    return text


def _add_member(text: str, start: int, key: str, value: str) -> str:
    """Add a member as the first one of the object at ``start``."""
    inside = start + 1
    separator = "" if text[_skip(text, inside)] == "}" else ","
    return text[:inside] + quote(key) + ":" + value + separator + text[inside:]


def put(text: str, path: tuple[str, ...], value: str) -> str:
    """Set the value at ``path`` to a JSON text; missing or null objects on the path are created.

    ValueError if another value than an object is there.
    """
    start = _skip(text, 0)
    for depth, key in enumerate(path, 1):
        found = _find(text, start, key)
        if found is None:
            return _add_member(text, start, key, _within(path[depth:], value))
        old, begin, end = found
        if old is None or depth == len(path):
            return text[:begin] + _within(path[depth:], value) + text[end:]
        if not isinstance(old, dict):
            raise ValueError(f"{'.'.join(path[:depth])} is not an object")  # noqa: TRY004
        start = begin
    raise ValueError("the path is empty")


def items(text: str, path: tuple[str, ...]) -> list[str]:
    """Return the texts of the items of the list at ``path``; KeyError if there is none."""
    start = _skip(text, 0)
    for key in path:
        found = _find(text, start, key)
        if found is None:
            raise KeyError(key)
        start = found[1]
    return [text[begin:end] for begin, end in _items(text, start)]


def replace_items(text: str, path: tuple[str, ...], changed: "dict[int, str]") -> str:
    """Replace items of the list at ``path``, by position, by JSON texts.

    KeyError or ValueError if there is no such list.
    """
    start = _skip(text, 0)
    for key in path:
        found = _find(text, start, key)
        if found is None:
            raise KeyError(key)
        start = found[1]
    parts, done = [], 0
    for index, (begin, end) in enumerate(_items(text, start)):
        if index in changed:
            parts += [text[done:begin], changed[index]]
            done = end
    return "".join([*parts, text[done:]])


def _items(text: str, start: int) -> "Iterator[tuple[int, int]]":
    """Yield begin and end in the text of each item of the list at ``start``."""
    if text[start : start + 1] != "[":
        raise ValueError(f"a list is missing at character {start}")
    index = _skip(text, start + 1)
    while text[index : index + 1] != "]":
        _, end = _value(text, index)
        yield index, end
        index = _skip(text, end)
        if text[index : index + 1] == ",":
            index = _skip(text, index + 1)


def quote(text: str) -> str:
    """Return a JSON string, ASCII only."""
    return _encode_string(text)


def quote_bytes(text: str) -> str:
    """Return a JSON string that keeps surrogates for single bytes unchanged."""
    return '"' + "".join(c if _is_byte(c) else _encode_string(c)[1:-1] for c in text) + '"'


def _is_byte(char: str) -> bool:
    """Tell whether a character represents a byte that isn't UTF-8 (``surrogateescape``)."""
    return "\udc80" <= char <= "\udcff"


def dumps(value: "Any") -> str:
    """Write plain data (dict, list, tuple, str, int, float, bool, None) as compact JSON."""
    if isinstance(value, str):
        return quote(value)
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (int, float)):
        return _number(value)
    if isinstance(value, dict):
        inside = ",".join([quote(str(key)) + ":" + dumps(item) for key, item in value.items()])
        return "{" + inside + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join([dumps(item) for item in value]) + "]"
    raise TypeError(f"{type(value).__name__} is not JSON")


def _number(value: float) -> str:
    """Write a number; one too large for a float as another one that is, as it was read."""
    text = repr(value)
    return {"inf": "1e999", "-inf": "-1e999"}.get(text, text)


def has_form(value: "Any", form: "Any") -> bool:
    """Tell whether a value has a form: a type, or a JSON value with types in it.

    ``[str]`` is a list of texts, ``(int, str)`` a list of a number and a text, ``{str: int}`` an
    object with numbers, and ``{"a": int}`` an object with that key and possibly others.
    """
    if isinstance(form, list):
        return isinstance(value, list) and all(has_form(each, form[0]) for each in value)
    if isinstance(form, tuple):
        same = isinstance(value, list) and len(value) == len(form)
        return same and all(map(has_form, value, form))
    if not isinstance(form, dict):
        return isinstance(value, form) and (form is bool or not isinstance(value, bool))
    if not isinstance(value, dict):
        return False
    if str in form:
        return all(has_form(each, form[str]) for each in value.values())
    return all(key in value and has_form(value[key], each) for key, each in form.items())


@dataclass_transform()
class Record:
    """Plain data with named fields: equality, repr and JSON by field, nothing else.

    A subclass declares its fields as annotations, with or without defaults. They are its
    arguments in that order, those of a base class first; TypeError for others, or too few. Fields
    with tuples of records are named again with the records' class:
    ``class Gpu(Record, mig=Mig)``.
    """

    _parts: "ClassVar[dict[str, type[Record]]]" = {}  # noqa: RUF012 - never changed
    _names: "ClassVar[tuple[str, ...]]"
    _sorted: "ClassVar[tuple[str, ...]]"
    _all: "ClassVar[frozenset[str]]"
    _needed: "ClassVar[frozenset[str]]"

    def __init_subclass__(cls, **parts: "type[Record]") -> None:
        if parts:
            cls._parts = {**cls._parts, **parts}

    @classmethod
    def _know_fields(cls) -> None:
        """Determine the class' fields; on first use, because a start uses few classes."""
        named = [[*each.__annotations__] for each in reversed(cls.__mro__[:-2])]
        cls._names = tuple(name for names in named for name in names)
        cls._sorted = tuple(name for names in named for name in sorted(names))
        cls._all = frozenset(cls._names)
        cls._needed = frozenset(name for name in cls._names if not hasattr(cls, name))

    def __init__(self, *values: "Any", **named: "Any") -> None:
        if "_names" not in type(self).__dict__:
            self._know_fields()
        if values:
            named.update(zip(self._names, values, strict=False))
        known = len(named) >= len(values) and self._all.issuperset(named)
        if not known or not self._needed.issubset(named):
            raise TypeError(f"{type(self).__name__} has other fields than {[*named]}")
        self.__dict__.update(named)  # even if a record forbids setting its fields

    @classmethod
    def from_json(cls, data: "dict[str, Any]") -> "Self":
        """Rebuild from the result of ``to_json``; KeyError or TypeError for anything else."""
        fields = {**data}
        for name, value in data.items():
            if value.__class__ is list:
                part = cls._parts.get(name)
                fields[name] = tuple([part.from_json(each) for each in value] if part else value)
            elif value.__class__ is dict:
                fields[name] = {key: tuple(values) for key, values in value.items()}
        return cls(**fields)

    def but(self, **changes: "Any") -> "Self":
        """Return a copy with other values of some fields."""
        made = type(self).__new__(type(self))
        made.__dict__.update(self.__dict__, **changes)
        return made

    def fields(self) -> "list[str]":
        """Return the names of the fields, those of a base class first."""
        if "_names" not in type(self).__dict__:  # it was made without __init__
            self._know_fields()
        return [*self._sorted]

    def to_json(self) -> "dict[str, Any]":
        """Return the fields as JSON values, nested records included."""
        return {name: _encode(getattr(self, name)) for name in self.fields()}

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in self.fields())

    def __hash__(self) -> int:
        return hash(tuple(getattr(self, name) for name in self.fields()))

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.fields())
        return f"{type(self).__name__}({fields})"


def _encode(value: "Any") -> "Any":
    if isinstance(value, Record):
        return value.to_json()
    if isinstance(value, (tuple, list)):
        return [_encode(item) for item in value]
    if isinstance(value, dict):
        return {key: _encode(item) for key, item in value.items()}
    return value

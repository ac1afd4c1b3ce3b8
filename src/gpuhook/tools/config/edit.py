"""Editor of settings in a config.toml that leaves the rest of the text unchanged."""

import re
import tomllib
from typing import Any

import tomlkit
from tomlkit.exceptions import TOMLKitError

from gpuhook.base.config.loader import examine
from gpuhook.base.config.model import FEATURE_PREFIX, FEATURES, KEYS, WITHOUT_EFFECT
from gpuhook.base.config.source import BOOL, LIST, NUMBER, PAUSE, SECONDS, flatten, parse
from gpuhook.base.errors import ConfigError, shown
from gpuhook.core.suggest import did_you_mean, similar

_TRUE = ("1", "t", "T", "TRUE", "true", "True")
_FALSE = ("0", "f", "F", "FALSE", "false", "False")
_DIGITS = 9  # most digits of an integer
_REMOVE = "nil"  # NVIDIA's value for "unset this feature"

Value = bool | str | float | list[str] | None


def parse_assignment(assignment: str, separator: str = ":") -> tuple[str, Value]:
    """Return (key, value) of KEY=VALUE; KEY without a value sets a boolean to true.

    Lists are split at ``separator`` if the value has one, else at commas. A list or a string may
    also be written as in TOML, as `gpuhook config show` prints it. The value None removes an
    optional feature. Raises ConfigError for unknown keys and wrong types.
    """
    key, equals, text = assignment.partition("=")
    kind = _kind(key)
    written = _as_in_toml(text)
    if isinstance(written, list) and kind == LIST:
        return key, written
    if isinstance(written, str):
        text = written
    if not equals and kind != BOOL:
        raise _not_a_value(key, kind, "nothing")
    if kind == BOOL:
        return key, _boolean(key, text if equals else "true")
    if kind == LIST:
        return key, (text.split(separator) if separator in text else _items(text))
    if kind in (SECONDS, PAUSE):
        return key, _seconds(key, kind, text)
    if kind == NUMBER:
        return key, _number(key, text)
    return key, text


def check_key(key: str) -> None:
    """Raise ConfigError for a key that gpuhook doesn't use, with similar keys."""
    _kind(key)


def _as_in_toml(text: str) -> str | list[str] | None:
    """Return the string or list of strings written as in TOML, None for other values."""
    if text[:1] not in ("[", '"', "'"):
        return None
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        return None
    if isinstance(value, list) and not all(isinstance(each, str) for each in value):
        return None
    return value if isinstance(value, str | list) else None


def _kind(key: str) -> str:
    if key in KEYS:
        return KEYS[key][1]
    if key.startswith(FEATURE_PREFIX) and key.removeprefix(FEATURE_PREFIX) in FEATURES:
        return BOOL
    if key in WITHOUT_EFFECT:
        raise ConfigError(f"{key} would have no effect: {WITHOUT_EFFECT[key]}", "Leave it out")
    question = similar_keys(key).lstrip()
    raise ConfigError(
        f"{shown(key)} is not a configuration key that gpuhook uses",
        f"{question} All keys are in `gpuhook config default`; the section comes before the dot"
        if question
        else "Take one from `gpuhook config default`, with its section before a dot",
    )


def similar_keys(key: str) -> str:
    """Return a question that names keys similar to an unknown one, "" if there are none.

    The same name in another section, or without a section, comes first. For an existing key, whose
    value is wrong, there is no question.
    """
    known = [*KEYS, *(FEATURE_PREFIX + name for name in FEATURES)]
    if key in known:
        return ""
    names = {each: each.rpartition(".")[2] for each in known}
    name = key.rpartition(".")[2]
    same = [each for each in known if names[each] == name]
    near = similar(name, names.values())
    like = [each for each in known if names[each] in near]
    return did_you_mean(same or like or similar(key, known))


def _boolean(key: str, text: str) -> bool | None:
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    if text == _REMOVE and key.startswith(FEATURE_PREFIX):
        return None
    raise _not_a_value(key, BOOL, text)


def _items(text: str) -> list[str]:
    return [item for part in text.split(",") if (item := part.strip())]


def _seconds(key: str, kind: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise _not_a_value(key, kind, text) from None


def _number(key: str, text: str) -> int:
    if text.isascii() and text.isdecimal() and len(text) <= _DIGITS:
        return int(text)
    raise _not_a_value(key, NUMBER, text)


def _not_a_value(key: str, kind: str, text: str) -> ConfigError:
    return ConfigError(
        f"{key} must be {kind}, not {shown(text)}", f"Write {key}=VALUE with such a value"
    )


def set_value(text: str, key: str, value: Value) -> str:
    """Return the TOML text with one key set (None: removed), and the rest unchanged.

    A commented default is replaced in its place. Raises ConfigError if the text isn't a valid
    configuration before or after.
    """
    before = flatten(parse(text))
    if value is None and key not in before:
        return text
    after = {name: known for name, known in before.items() if name != key}
    if value is not None:
        after[key] = value
    ways = (_replace,) if value is None else (_replace, _uncomment, _below_header, _at_end)
    for change in ways:
        changed = change(text, key, value)
        if changed is not None and _reads_as(changed, after):
            _check(text, changed)
            return changed
    raise ConfigError(
        f"{key} can't be changed safely in a file of this form",
        "Edit it by hand and run `gpuhook config validate`",
    )


def unset(text: str, key: str) -> str:
    """Return the TOML text without a key; ConfigError if it is neither set nor known."""
    if key not in flatten(parse(text)):
        check_key(key)
    return set_value(text, key, None)


def _check(before: str, after: str) -> None:
    """Raise ConfigError for an error that a change would introduce, else for an existing one."""
    errors = examine(after)[1]
    known = {_without_place(error) for error in examine(before)[1]}
    for error in errors:
        if (problem := _without_place(error)) not in known:
            raise ConfigError(problem, "Nothing was written: give it another value")
    if errors:
        raise errors[0]


def _without_place(error: ConfigError) -> str:
    """Return an error's text without the line, because the changed text isn't written."""
    return error.cause.partition(": ")[2]


def _reads_as(text: str, expected: dict[str, object]) -> bool:
    try:
        return flatten(tomllib.loads(text)) == expected
    except tomllib.TOMLDecodeError:
        return False


def _split(key: str) -> tuple[list[str], str]:
    *tables, name = key.split(".")
    return tables, name


def _replace(text: str, key: str, value: Value) -> str | None:
    """Change the key where it is set; tomlkit keeps the comment after it."""
    tables, name = _split(key)
    try:
        document = tomlkit.parse(text)
        table: Any = document
        for part in tables:
            table = table.get(part)
            if not isinstance(table, dict):
                return None
        if name not in table:
            return None
        if value is None:
            del table[name]
        else:
            table[name] = value
        return tomlkit.dumps(document)
    except TOMLKitError:
        return None


def _uncomment(text: str, key: str, value: Value) -> str | None:
    """Replace the line ``#name = ...`` in the key's own section."""
    tables, name = _split(key)
    section, lines = "", text.split("\n")
    pattern = re.compile(rf"\s*#\s*{re.escape(name)}\s*=.*")
    for number, line in enumerate(lines):
        header = re.fullmatch(r"\s*\[([^\[\]]+)\]\s*(#.*)?\s*", line)
        if header:
            section = header[1].strip()
        elif section == ".".join(tables) and pattern.fullmatch(line.removesuffix("\r")):
            lines[number] = _line(name, value) + "\r"[: line.endswith("\r")]
            return "\n".join(lines)
    return None


def _below_header(text: str, key: str, value: Value) -> str | None:
    """Write the key below its section's header, or at the top if it has no section."""
    tables, name = _split(key)
    line = _line(name, value)
    if not tables:
        return f"{line}\n{text}"
    header = rf"(?m)^[ \t]*\[\s*{re.escape('.'.join(tables))}\s*\][ \t]*(#.*)?\r?$"
    found = re.search(header, text)
    if found is None:
        return None
    end = "\r"[: found[0].endswith("\r")]
    return f"{text[: found.end()]}\n{line}{end}{text[found.end() :]}"


def _at_end(text: str, key: str, value: Value) -> str | None:
    """Write the key with a new header at the end."""
    tables, name = _split(key)
    ending = "" if not text or text.endswith("\n") else "\n"
    return f"{text}{ending}\n[{'.'.join(tables)}]\n{_line(name, value)}\n"


def _line(name: str, value: Value) -> str:
    return f"{name} = {tomlkit.item(value).as_string()}"

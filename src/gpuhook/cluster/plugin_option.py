"""An option of the device plugin: its name, its places in the file, and its values.

Vendors define their own options in a module ``plugin`` of their folder
(``vendor_parts.PluginModule``).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_TRUE = ("1", "t", "T", "TRUE", "true", "True")  # as Go reads them
_FALSE = ("0", "f", "F", "FALSE", "false", "False")


@dataclass(frozen=True)
class Kind:
    """The type of an option's values.

    ``words`` describe the expected value. ``parse`` returns the value of a text, and raises
    ValueError, with the expected value, for an invalid one. ``metavar`` is for the help, and
    ``types`` are allowed in a file; an option of ``several`` words may be repeated as a flag.
    """

    words: str
    parse: Callable[["PluginOption", str], Any]
    metavar: str = "TEXT"
    types: tuple[type, ...] = (str,)
    several: bool = False


@dataclass(frozen=True)
class PluginOption:
    """One option: ``field`` of its settings, ``place`` in the file, ``old`` names of the flag.

    A vendor's option is listed in the help ``before`` the flag of that name, or at the end.
    """

    flag: str
    field: str
    kind: Kind
    help: str
    place: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    old: tuple[str, ...] = ()
    is_ours: bool = False
    before: str = ""

    @property
    def variables(self) -> tuple[str, ...]:
        """The environment variables that set it; the first one that is set counts."""
        prefix = "gpuhook_" if self.is_ours else ""
        return tuple(f"{prefix}{each}".upper().replace("-", "_") for each in (self.flag, *self.old))

    @property
    def expected(self) -> str:
        """The description of a valid value."""
        return f"{self.kind.words} {', '.join(self.choices)}".strip()

    def parse(self, text: str) -> Any:
        """Return the value of a text; ValueError, with the expected value, if it is invalid."""
        return self.kind.parse(self, text.strip())

    def check(self, value: object) -> Any:
        """Convert a file's value to the setting's value; ValueError as ``parse``."""
        types = self.kind.types
        if not isinstance(value, types) or isinstance(value, bool) != (types == (bool,)):
            raise ValueError(self.expected)
        if isinstance(value, dict):
            value = [f"{key}={each}" for key, each in value.items()]
        return self.parse(",".join(map(str, value)) if isinstance(value, list) else str(value))


def number(text: str) -> int | None:
    """Return a number of at most 18 digits, None if the text isn't one."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 19 else None


def words(text: str) -> list[str]:
    """Split a text at commas, and strip blanks."""
    return [word.strip() for word in text.split(",")]


def _flag(option: PluginOption, text: str) -> bool:
    if text not in (*_TRUE, *_FALSE):
        raise ValueError(option.expected)
    return text in _TRUE


def _choice(option: PluginOption, text: str) -> str:
    if text not in option.choices:
        raise ValueError(option.expected)
    return text


def _words(option: PluginOption, text: str) -> tuple[str, ...]:
    found = words(text)
    if not {*found} <= {*option.choices}:
        raise ValueError(option.expected)
    return tuple(dict.fromkeys(found))


def _path(option: PluginOption, text: str) -> str:
    if not text.startswith("/") or "\0" in text:
        raise ValueError(option.expected)
    return text


def seconds(least: float) -> Kind:
    """Return the kind for a time in seconds, ``least`` or more."""

    def parse(option: PluginOption, text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise ValueError(option.expected) from None
        if not least <= value <= 1e9:
            raise ValueError(f"{option.expected}, at least {least:g}")
        return value

    return Kind("a number of seconds", parse, "SECONDS", (int, float))


def numbers(below: int) -> Kind:
    """Return the kind for a list of numbers, each less than ``below``."""

    def parse(_: PluginOption, text: str) -> tuple[int, ...]:
        found = [number(word) for word in words(text)] if text else []
        known = [each for each in found if each is not None and each < below]
        if len(known) < len(found):
            raise ValueError(f"numbers from 0 to {below - 1}")
        return tuple(dict.fromkeys(known))

    return Kind("numbers", parse, "N,...", (str, list), several=True)


FLAG = Kind("true or false", _flag, "true|false", (bool,))
TEXT = Kind("a text", lambda _, text: text)
CHOICE = Kind("one of", _choice)
WORDS = Kind("one or several of", _words, types=(str, list), several=True)
PATH = Kind("an absolute path", _path, "PATH")

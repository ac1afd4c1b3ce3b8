"""Vendors declared in config.toml: ``[[gpuhook.vendors]]`` tables, checked and as records.

For accelerators whose devices are nodes with a number in their names, with the same files for
all devices. docs/vendors/declared.md explains the keys.
"""

from gpuhook.base import names
from gpuhook.base.config.source import LIST, STRING
from gpuhook.base.errors import shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    # Reports an error of a key.
    Wrong = Callable[[str, str], None]

NUMBER = "{n}"  # in the path of a node: the device's number
VARIABLE = "variable"  # the variable that CDI specs set to void, or "none"

# key -> its type and default; keys without a default are required.
FIELDS: "dict[str, tuple[str, Any]]" = {
    "name": (STRING, None),
    "title": (STRING, ""),
    "noun": (STRING, "device"),
    "kind": (STRING, None),
    "variable": (STRING, None),
    "present": (STRING, ""),
    "nodes": (LIST, None),
    "optional-nodes": (LIST, ()),
    "numbers": (STRING, "node"),
    "control": (LIST, ()),
    "files": (LIST, ()),
    "folders": (LIST, ()),
    "writable-folders": (LIST, ()),
    "libraries": (LIST, ()),
    "environment": (LIST, ()),
    "void": (STRING, VARIABLE),
}
NUMBERS = ("node", "position")
_VOID = (VARIABLE, "none")
DRIVER, PCI = "driver:", "pci:"  # prefixes of the proof that a driver is present

_LONGEST = 32
_SMALL = frozenset("abcdefghijklmnopqrstuvwxyz")
_DIGITS = frozenset("0123456789")
_CAPITALS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
_WORD = _SMALL | _CAPITALS | _DIGITS | {"_"}
_PATH = _WORD | frozenset("-.:@+,/")
_WHOLE = ("/dev", "/proc", "/sys", "/etc", "/usr", "/run", "/lib", "/bin", "/tmp")  # noqa: S108
_EVERYBODYS = ("/tmp/", "/var/tmp/", "/dev/shm/", "/run/user/", "/run/lock/")  # noqa: S108
_HEX = _DIGITS | frozenset("abcdef")


class DeclaredTable:
    """A declared vendor: the fields of its table, with ``_`` for ``-`` in the names."""

    __slots__ = tuple(key.replace("-", "_") for key in FIELDS)

    if TYPE_CHECKING:
        name: str
        title: str
        noun: str
        kind: str
        variable: str
        present: str
        nodes: tuple[str, ...]
        optional_nodes: tuple[str, ...]
        numbers: str
        control: tuple[str, ...]
        files: tuple[str, ...]
        folders: tuple[str, ...]
        writable_folders: tuple[str, ...]
        libraries: tuple[str, ...]
        environment: tuple[str, ...]
        void: str

    def __init__(self, table: "dict[str, Any]") -> None:
        for key, (_, default) in FIELDS.items():
            value = table.get(key, default)
            setattr(self, key.replace("-", "_"), tuple(value) if isinstance(value, list) else value)
        self.title = self.title or self.name.capitalize()

    def values(self) -> "dict[str, Any]":
        """Return its table, without default values."""
        found = {key: getattr(self, key.replace("-", "_")) for key in FIELDS}
        return {key: value for key, value in found.items() if value != FIELDS[key][1]}


def read(tables: "list[Any]", wrong_at: "Callable[[int], Wrong]") -> "tuple[DeclaredTable, ...]":
    """Return the vendors of tables; an invalid one is reported and left out.

    ``wrong_at`` returns the function that reports errors of the table with that number.
    """
    found: list[DeclaredTable] = []
    for number, table in enumerate(tables):
        wrong = wrong_at(number)
        if _has_the_types(table, wrong):
            made = DeclaredTable(table)
            if _is_well_formed(made, wrong) and _is_new(made, found, wrong):
                found.append(made)
    return tuple(found)


def _has_the_types(table: "dict[str, Any]", wrong: "Wrong") -> bool:
    good = True
    for key, (kind, default) in FIELDS.items():
        value = table.get(key)
        if value is None and default is None:
            wrong("", f"lacks {key}")
            good = False
        elif value is not None and not _is_kind(kind, value):
            wrong(key, f"must be {kind}, not {shown(value)}")
            good = False
    for key in table:
        if key not in FIELDS:
            wrong(key, f"isn't a key of a vendor; the keys are {', '.join(FIELDS)}")
            good = False
    return good


def _is_kind(kind: str, value: object) -> bool:
    if kind == STRING:
        return isinstance(value, str)
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_new(made: DeclaredTable, others: "list[DeclaredTable]", wrong: "Wrong") -> bool:
    for key in ("name", "kind", "variable"):
        value = getattr(made, key)
        if any(value == getattr(other, key) for other in others):
            wrong(key, f"is {shown(value)}, as in another declared vendor")
            return False
    return True


def _is_well_formed(made: DeclaredTable, wrong: "Wrong") -> bool:
    """Tell whether all values are valid, and report those that aren't."""
    checks: list[tuple[str, tuple[str, ...], Callable[[str], bool], str]] = [
        ("name", (made.name,), _is_name, "made of lower-case letters, digits and -"),
        ("kind", (made.kind,), _is_cdi_kind, "a CDI kind such as vendor.com/npu"),
        ("variable", (made.variable,), _is_variable, "a name such as MAKER_VISIBLE_DEVICES"),
        ("present", (made.present,), _is_proof, "a path, driver:NAME or pci:VENDOR (four digits)"),
        ("numbers", (made.numbers,), NUMBERS.__contains__, " or ".join(NUMBERS)),
        ("nodes", made.nodes, _is_node, f"a path below /dev with {NUMBER} in its last part"),
        ("optional-nodes", made.optional_nodes, _is_optional_node, "a path below /dev"),
        ("control", made.control, _is_control, f"a path below /dev without {NUMBER}"),
        ("files", made.files, _is_path, "an absolute path of a file"),
        ("folders", made.folders, _is_path, "an absolute path of a folder of the driver's own"),
        ("writable-folders", made.writable_folders, _is_path, "an absolute path of a folder"),
        ("libraries", made.libraries, _is_library, "a library's name or absolute path"),
        ("environment", made.environment, _is_setting, "NAME=VALUE of printable characters"),
        ("void", (made.void,), _VOID.__contains__, " or ".join(_VOID)),
    ]
    good = bool(made.nodes)
    if not good:
        wrong("nodes", "is empty")
    for key, values, is_right, expected in checks:
        for value in values:
            if not is_right(value):
                wrong(key, f"contains {shown(value)}, which isn't {expected}")
                good = False
    return good


def _is_name(text: str) -> bool:
    fits = 0 < len(text) <= _LONGEST and text[0] in _SMALL
    return fits and (_SMALL | _DIGITS | {"-"}).issuperset(text)


def _is_cdi_kind(text: str) -> bool:
    return names.cdi_parts(f"{text}=0") is not None


def _is_variable(text: str) -> bool:
    """Accept names that no other program has by accident: capitals with a _ between them."""
    letters = _CAPITALS | _DIGITS | {"_"}
    return letters.issuperset(text) and "_" in text.strip("_") and text[0] not in _DIGITS


def _is_proof(text: str) -> bool:
    if text.startswith(PCI):
        digits = text.removeprefix(PCI)
        return len(digits) == 4 and _HEX.issuperset(digits)
    if text.startswith(DRIVER):
        word = text.removeprefix(DRIVER)
        return bool(word) and (_WORD | {"-"}).issuperset(word)
    return not text or _is_plain(text)


def _is_plain(path: str) -> bool:
    """Tell whether it is a normalized absolute path, outside of world-writable folders."""
    parts = path.split("/")[1:]
    usual = path.startswith("/") and _PATH.issuperset(path)
    usual = usual and not f"{path}/".startswith(_EVERYBODYS)
    return usual and not any(part in ("", ".", "..") for part in parts)


def _is_path(text: str) -> bool:
    return _is_plain(text) and text not in _WHOLE


def _is_node(text: str) -> bool:
    last = text.rpartition("/")[2]
    return last.count(NUMBER) == 1 and _is_control(text.replace(NUMBER, "0", 1))


def _is_optional_node(text: str) -> bool:
    folder, _, last = text.rpartition("/")
    stars = last.count("*")
    if last.count(NUMBER) > 1 or stars > last.count(NUMBER) or f"{NUMBER}*" in last:
        return False
    return _is_control(f"{folder}/{last.replace(NUMBER, '0').replace('*', '0')}")


def _is_control(text: str) -> bool:
    return text.startswith("/dev/") and _is_plain(text)


def _is_library(text: str) -> bool:
    folder, slash, last = text.rpartition("/")
    name = last.replace("*", "0")
    known = name.startswith(("lib", "ld-")) and ".so" in last and _PATH.issuperset(name)
    return known and (not slash or _is_plain(folder))


def _is_setting(text: str) -> bool:
    name, equals, value = text.partition("=")
    if not value.isprintable():  # files of variables have no line breaks, nothing has a NUL
        return False
    return bool(equals and name) and _WORD.issuperset(name) and name[0] not in _DIGITS

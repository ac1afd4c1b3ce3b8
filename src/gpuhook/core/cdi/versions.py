"""Versions of CDI specs: which version a field needs, and which one an engine accepts.

A reader refuses a file with a version that it doesn't know, even if the file uses nothing new.
So a CDI spec gets the lowest version that its fields allow. Sources: SPEC.md of the CDI
specification (its table of releases), and the library's versions in the engines' go.mod.
"""

from gpuhook.core.cdi.names import split_kind

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    Path = tuple[str | int, ...]

# All versions. The first two are known to every reader, and refused by every one.
KNOWN = (
    "0.1.0", "0.2.0", "0.3.0", "0.4.0", "0.5.0", "0.6.0", "0.7.0", "0.8.0", "1.0.0", "1.1.0",
)  # fmt: skip
EARLIEST = "0.3.0"
NEWEST = KNOWN[-1]

GROUPS = "0.7.0"  # supplementary groups of the container's process

# A field of container edits that 0.3.0 lacks -> the version that introduced it.
EDITS: "dict[tuple[str, ...], str]" = {
    ("mounts", "type"): "0.4.0",
    ("deviceNodes", "hostPath"): "0.5.0",
    ("intelRdt",): "0.7.0",
    ("additionalGids",): GROUPS,
    ("netDevices",): "1.1.0",
    ("intelRdt", "schemata"): "1.1.0",
    ("intelRdt", "enableMonitoring"): "1.1.0",
}
# Fields that need their version even if they are empty; other empty ones need nothing.
EVEN_EMPTY = (("intelRdt",), ("intelRdt", "schemata"))
ANNOTATIONS = "0.6.0"  # of a CDI spec or a device
DIGIT_FIRST = "0.5.0"  # a device name that doesn't begin with a letter
DOT_IN_CLASS = "0.6.0"

# Engine -> (its first version with a library, the highest CDI version of that library), oldest
# first. An engine older than its first entry has no CDI.
ENGINES = {
    "podman": (
        ("4.1", "0.4.0"), ("4.3", "0.5.0"), ("4.9", "0.6.0"), ("5.2", "0.8.0"), ("5.5", "1.0.0"),
    ),
    "docker": (
        ("25.0", "0.6.0"), ("26.1", "0.7.0"), ("27.5", "0.8.0"), ("28.2", "1.0.0"),
        ("29.2", "1.1.0"),
    ),
    "containerd": (
        ("1.7.0", "0.5.0"), ("1.7.16", "0.7.0"), ("1.7.27", "0.8.0"), ("2.0.5", "1.0.0"),
        ("2.3", "1.1.0"),
    ),
    "crio": (
        ("1.26", "0.5.0"), ("1.28", "0.6.0"), ("1.30", "0.7.0"), ("1.31", "0.8.0"),
        ("1.33", "1.0.0"), ("1.35", "1.1.0"),
    ),
}  # fmt: skip
# Engine -> (from which version, before which one) CDI is off unless a setting enables it:
# Docker's features.cdi, containerd's enable_cdi. Later versions enable it by default.
SWITCHED = {"docker": ("25.0", "28.2"), "containerd": ("1.7.0", "2.0")}
# Folders that engines read: the administrator's, then the one for generated CDI specs.
# Engine -> (from which version, before which one) it reads only the first.
FOLDERS = ("/etc/cdi", "/var/run/cdi")
FIRST_FOLDER_ALONE = {"podman": ("5.4", "5.7")}
# Debian builds its engines with its own version of the library.
DEBIAN = {"bookworm": "0.5.0", "trixie": "0.8.0", "sid": "1.0.0"}


def needed(document: "dict[str, Any]") -> str:
    """Return the lowest version that fits a CDI spec."""
    return max((version for version, _ in needs(document)), key=order, default=EARLIEST)


def needs(document: "dict[str, Any]") -> "Iterator[tuple[str, Path]]":
    """Yield (version, path) of each part that needs more than the earliest version."""
    vendor, device_class = split_kind(document.get("kind") or "")
    if vendor and "." in device_class:
        yield DOT_IN_CLASS, ("kind",)
    yield from _of_table(document)
    for index, device in enumerate(document.get("devices") or ()):
        name = device.get("name") or ""
        if name and not (name[0].isascii() and name[0].isalpha()):
            yield DIGIT_FIRST, ("devices", index, "name")
        for version, path in _of_table(device):
            yield version, ("devices", index, *path)


def _of_table(table: "dict[str, Any]") -> "Iterator[tuple[str, Path]]":
    """Yield the needs that a CDI spec and a device have in common: annotations and edits."""
    if table.get("annotations"):
        yield ANNOTATIONS, ("annotations",)
    for field, version in EDITS.items():
        for value, path in _values(table.get("containerEdits"), field):
            if value or (value is not None and field in EVEN_EMPTY):
                yield version, ("containerEdits", *path)


def _values(value: "Any", names: "tuple[str, ...]") -> "Iterator[tuple[Any, Path]]":
    """Yield the values below a chain of names, for each item of a list."""
    if not names:
        yield value, ()
    elif isinstance(value, dict):
        for found, path in _values(value.get(names[0]), names[1:]):
            yield found, (names[0], *path)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            for found, path in _values(item, names):
                yield found, (index, *path)


def is_known(version: str) -> bool:
    """Tell whether a version exists; a leading v is accepted, as by readers."""
    return version.removeprefix("v") in KNOWN


def is_below(version: str, other: str) -> bool:
    """Tell whether a version is lower than another."""
    return order(version.removeprefix("v")) < order(other)


def accepts(library: str, version: str) -> bool:
    """Tell whether a library version accepts CDI specs of a version that fits their fields."""
    number = version.removeprefix("v")
    return is_known(version) and order(EARLIEST) <= order(number) <= order(library)


def highest(engine: str, version: str) -> str | None:
    """Return the highest CDI version that an engine accepts, None if it has no CDI."""
    found = [top for first, top in ENGINES.get(engine, ()) if order(first) <= order(version)]
    return found[-1] if found else None


def is_switched(engine: str, version: str | None) -> bool:
    """Tell whether an engine needs a setting for CDI; an unknown version may need it."""
    if version is None:
        return engine in SWITCHED
    return _is_within(SWITCHED.get(engine), version)


def folder_for(engines: "dict[str, str | None]") -> str:
    """Return the folder for generated CDI specs that all these engines read.

    ``engines`` are versions by name, None for an unknown one.
    """
    first, generated = FOLDERS
    alone = (_is_within(FIRST_FOLDER_ALONE.get(each), of) for each, of in engines.items())
    return first if any(alone) else generated


def _is_within(span: "tuple[str, str] | None", version: str | None) -> bool:
    """Tell whether a version is in a half-open span."""
    if span is None or version is None:
        return False
    return order(span[0]) <= order(version) < order(span[1])


def order(version: str) -> tuple[int, ...]:
    """Return the sort key of a version: the leading digits of three parts."""
    parts = [0, 0, 0]
    for index, word in enumerate(version.split(".")[: len(parts)]):
        digits = word[: len(word) - len(word.lstrip("0123456789"))]
        parts[index] = int(digits or 0)
    return tuple(parts)

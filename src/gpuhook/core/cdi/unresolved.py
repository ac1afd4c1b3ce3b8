"""Error message for CDI devices that no CDI spec defines.

It names the devices that exist, or the file that should have defined the missing one. It is
short, because engines put it into one line; ``gpuhook cdi list`` shows the rest.
"""

from gpuhook.base.errors import UnknownDeviceError, listed, shown
from gpuhook.core.cdi import names as cdi_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from gpuhook.core.cdi.folders import FileError, FolderContent, IgnoredFile

_MOST = 450  # characters of the whole message
_MOST_NAMES = 240  # of the unusable names
_MOST_OFFERED = 90  # of the existing names of one kind
_PATH = 100  # of one path
_SENTENCE = 90  # of one file's error
_REMEDY = "List the devices, and the files that engines refuse, with gpuhook cdi list"
_ENDINGS_MEANT = (".yml", ".yaml", ".json")  # in upper or lower case


def error(found: "FolderContent", names: list[str]) -> UnknownDeviceError:
    """Return the error for unknown device names: what exists, and what is in the way."""
    parts = [cdi_names.split(name) for name in names if name not in found.conflicts]
    kinds = dict.fromkeys(f"{vendor}/{kind}" for vendor, kind, _ in parts if vendor)
    offers = [_offer(found, kind) for kind in kinds]
    asked = _fitting([_reason(found, name) for name in names], _MOST_NAMES)
    cause = f"These CDI devices can't be used: {asked}"
    space = _MOST - len(_REMEDY) - len(". .")
    for each in (*offers[:1], *_suspects(found, kinds), *offers[1:]):
        if len(cause) + len(each) + 2 <= space:
            cause += f"; {each}"
    return UnknownDeviceError(cause, _REMEDY)


def _reason(found: "FolderContent", name: str) -> str:
    files = found.conflicts.get(name)
    if not files:
        return shown(name)
    return f"{shown(name)} (in {' and '.join(_path(file) for file in files[:2])})"


def _offer(found: "FolderContent", kind: str) -> str:
    """Return the sentence about the existing devices of a kind."""
    devices = [name for name in found.devices if name.startswith(f"{kind}=")]
    if devices:
        devices.sort(key=lambda name: (len(name), name))  # numbers, then "all", then UUIDs
        there = [shown(name.partition("=")[2]).strip("'") for name in devices]
        return f"of {shown(kind)} there are {_fitting(there, _MOST_OFFERED)}"
    if any(document["kind"] == kind for document in found.documents.values()):
        return f"no device of {shown(kind)} can be used"
    places = listed([_path(folder) for folder in found.folders], 2) or "no folder"
    return f"no CDI spec in {places} is of the kind {shown(kind)}"


def _suspects(found: "FolderContent", kinds: "Iterable[str]") -> list[str]:
    """Return the files that may have been meant to define these kinds, the likeliest first.

    The content of an unreadable file is unknown, but its name may tell.
    """
    stems = [cdi_names.file_stem(*cdi_names.split_kind(kind)) for kind in kinds]
    words = {word for kind in kinds for word in (*stems, *kind.split("/")[0].split(".")[:1])}

    def is_unlikely(each: "FileError | IgnoredFile") -> bool:
        name = each.file.rpartition("/")[2]
        return not any(word and word in name for word in words)

    errors = sorted(found.errors, key=is_unlikely)
    ignored = sorted((each for each in found.ignored if _is_meant(each.file)), key=is_unlikely)
    said = [_spoiled(each) for each in errors[:1]]
    said += [f"{_path(each.file)} isn't read: {each.reason}" for each in ignored[:1]]
    return said if kinds else []


def _is_meant(file: str) -> bool:
    return file.lower().endswith(_ENDINGS_MEANT)


def _spoiled(each: "FileError") -> str:
    line = f", line {each.line}" if each.line else ""
    sentence = each.message
    if len(sentence) > _SENTENCE:
        sentence = f"{sentence[:_SENTENCE]}..."
    return f"{_path(each.file)}{line}: {sentence}"


def _path(path: str) -> str:
    """Return a path shortened for a message; the end of a long path is kept."""
    text = path if path.isascii() and path.isprintable() else ascii(path)[1:-1]
    return text if len(text) <= _PATH else f"...{text[-_PATH:]}"


def _fitting(words: list[str], space: int) -> str:
    """Return as many words as fit into the given number of characters, at least one."""
    count, size = 0, 0
    for word in words:
        size += len(word) + 2
        if count and size > space:
            break
        count += 1
    return listed(words, count)

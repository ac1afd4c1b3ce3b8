"""Driver capabilities: what part of the driver a container asks for, and what it may have.

Hot path: imports nothing heavy.
"""

from gpuhook.errors import CapabilityError
from gpuhook.quoting import listed, shown

VARIABLE = "NVIDIA_DRIVER_CAPABILITIES"
KNOWN = ("compat32", "compute", "display", "graphics", "ngx", "utility", "video")
DEFAULT = ("compute", "utility")


def split(value: str) -> tuple[str, ...]:
    """Return the words of a comma list, blanks trimmed, duplicates and empties dropped, sorted."""
    return tuple(sorted({word for part in value.split(",") if (word := part.strip())}))


def intersection(asked: tuple[str, ...], supported: tuple[str, ...]) -> tuple[str, ...]:
    """Return, sorted, what both hold; a member ``all`` of either stands for the other."""
    if "all" in supported:
        return tuple(sorted(asked))
    if "all" in asked:
        return tuple(sorted(supported))
    return tuple(sorted(set(asked) & set(supported)))


def supported_by(setting: str) -> tuple[str, ...]:
    """Return the capabilities that the setting supported-driver-capabilities allows, sorted.

    Unknown words were refused when the configuration was read.
    """
    return intersection(KNOWN, split(setting))


def granted(value: str | None, legacy: bool, supported: tuple[str, ...]) -> tuple[str, ...]:
    """Return the capabilities, sorted, that a container gets.

    ``value`` is NVIDIA_DRIVER_CAPABILITIES (None: not set), ``legacy`` says that the image
    is older than that variable. Raises CapabilityError, naming the words, for a list that
    holds more than is supported (``all`` never does), or a word that is none.
    """
    if value is None and legacy:
        return supported
    asked = split(value or "")
    if not asked:
        return intersection(DEFAULT, supported)
    if "all" in asked:
        return supported
    unknown = tuple(word for word in asked if word not in KNOWN)
    if unknown:
        raise _unknown(unknown)
    refused = tuple(shown(word) for word in asked if word not in supported)
    if refused:
        raise CapabilityError(
            f"{VARIABLE} asks for {listed(refused)}, and only "
            f"{','.join(supported) or 'the empty list'} is supported here",
            f"Remove it from {VARIABLE}, or allow it with supported-driver-capabilities "
            "in gpuhook's config.toml",
        )
    return asked


def _unknown(words: tuple[str, ...]) -> CapabilityError:
    verb = "is no driver capability" if len(words) == 1 else "are no driver capabilities"
    meant = tuple(dict.fromkeys(guess for word in words if (guess := _meant(word))))
    hint = f" (did you mean {','.join(meant)}?)" if meant else ""
    return CapabilityError(
        f"{listed(tuple(map(shown, words)))} {verb}: there are {', '.join(KNOWN)} and all",
        f"Correct {VARIABLE}{hint}",
    )


def _meant(word: str) -> str:
    """Return the known words, comma-separated, that a misspelled one must stand for, or ""."""
    parts = word.lower().split()
    found = [next((name for name in (*KNOWN, "all") if _near(part, name)), "") for part in parts]
    return ",".join(found) if all(found) else ""


def _near(word: str, name: str) -> bool:
    """Tell whether one letter too many, too few or wrong, or two swapped, is all the difference."""
    if abs(len(word) - len(name)) > 1:
        return False
    while word and name and word[0] == name[0]:
        word, name = word[1:], name[1:]
    while word and name and word[-1] == name[-1]:
        word, name = word[:-1], name[:-1]
    return max(len(word), len(name)) <= 1 or (len(word) == 2 and word == name[::-1])

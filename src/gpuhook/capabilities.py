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
    holds more than is supported; ``all`` never does.
    """
    if value is None and legacy:
        return supported
    asked = split(value or "")
    if not asked:
        return intersection(DEFAULT, supported)
    if "all" in asked:
        return supported
    refused = tuple(shown(word) for word in asked if word not in supported)
    if refused:
        raise CapabilityError(
            f"{VARIABLE} asks for {listed(refused)}, and only "
            f"{','.join(supported) or 'the empty list'} is supported here",
            f"Remove it from {VARIABLE}, or allow it with supported-driver-capabilities "
            "in gpuhook's config.toml",
        )
    return asked

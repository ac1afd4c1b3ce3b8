"""Which version of the CDI specification a document needs: the lowest, never the newest.

A reader refuses a whole file whose version it doesn't know, also where nothing new is in it.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

EARLIEST = "0.3.0"


def needed(document: "dict[str, Any]") -> str:
    """Return the lowest version that a document may have."""
    return max(_needs(document), default=EARLIEST, key=_number)


def is_below(version: str, other: str) -> bool:
    """Tell whether a version is lower than another."""
    return _number(version.removeprefix("v")) < _number(other)


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def _needs(document: "dict[str, Any]") -> "Iterator[str]":
    devices = document.get("devices") or []
    if any(str(device.get("name", ""))[:1].isdigit() for device in devices):
        yield "0.5.0"
    for part in (document, *devices):
        edits = part.get("containerEdits") or {}
        if any(node.get("hostPath") for node in edits.get("deviceNodes") or ()):
            yield "0.5.0"
        if edits.get("additionalGids"):
            yield "0.7.0"

"""A container's environment: the list in an OCI spec as a mapping.

Hot path: imports nothing.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

_TRUE = ("1", "t", "T", "TRUE", "true", "True")


def parse(entries: "Iterable[str]") -> dict[str, str]:
    """Return NAME=VALUE entries as a mapping; of several entries for a name the last counts.

    An entry without = is a name that is set to nothing: it never fails a container.
    """
    variables = {}
    for entry in entries:
        name, _, value = entry.partition("=")
        variables[name] = value
    return variables


def is_true(value: str | None) -> bool:
    """Say whether a value means yes, by the words of Go's strconv.ParseBool; others mean no."""
    return value in _TRUE


def items(value: str) -> list[str]:
    """Return the items of a comma list, blanks trimmed and empties dropped, in order."""
    return [item for part in value.split(",") if (item := part.strip())]

"""Result of reading a file: a CDI spec, or its errors. Imports nothing slow."""

from gpuhook.base.oci.jsontext import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MOST_BYTES = 4 << 20  # of one file: CDI specs of large hosts have some 100 KiB


class Problem(Record):
    """An error in a CDI spec: a sentence without a full stop, and its line, if any."""

    line: int | None
    sentence: str


class ParseResult(Record):
    """Content of a file: a CDI spec, or the errors that make it unusable."""

    document: "dict[str, Any] | None"
    problems: "tuple[Problem, ...]" = ()

"""What reading a file gives: a document, or what is wrong with it. Imports nothing slow."""

from gpuhook.ground.oci.jsontext import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MOST_BYTES = 4 << 20  # of one file: documents of large machines have some 100 KiB


class Problem(Record):
    """What is wrong with a document: a sentence without a full stop, and its line, if any."""

    line: int | None
    sentence: str


class Reading(Record):
    """A file's content as read: a document, or else the problems why there is none."""

    document: "dict[str, Any] | None"
    problems: "tuple[Problem, ...]" = ()

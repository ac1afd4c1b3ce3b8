"""What reading a file gives: a document, or what is wrong with it. Imports nothing slow."""

from gpuhook.ground.oci.jsontext import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MOST_BYTES = 4 << 20  # of one file: documents of large machines have some 100 KiB


class Problem(Record):
    """What is wrong with a document: a sentence without a full stop, and its line, if any."""

    __slots__ = ("line", "sentence")

    def __init__(self, line: int | None, sentence: str) -> None:
        self.line = line
        self.sentence = sentence


class Reading(Record):
    """A file's content as read: a document, or else the problems why there is none."""

    __slots__ = ("document", "problems")

    def __init__(
        self, document: "dict[str, Any] | None", problems: "tuple[Problem, ...]" = ()
    ) -> None:
        self.document = document
        self.problems = problems

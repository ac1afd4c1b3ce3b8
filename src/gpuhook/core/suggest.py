"""Suggestions for refused requests and misspelt words; successful starts don't import this."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

_SEPARATORS = str.maketrans(";|\t\n\r ", ",,,,,,")
# Quotes and brackets: NAME="0,1" in a compose file's list puts them into the value.
_AROUND = str.maketrans("", "", "\"'`[](){}")
_SHOWN = 48  # characters
_LIKENESS = 0.7


def separated(names: "Sequence[str]") -> str:
    """Return invalid names rewritten as a valid comma-separated list, "" if that fails."""
    text = ",".join(names).translate(_AROUND).translate(_SEPARATORS)
    words = [word for word in text.split(",") if word]
    return ",".join(words) if words and len(text) <= _SHOWN else ""


def counted(selectors: "Sequence[str]", indices: "Collection[int]") -> int:
    """Return how many devices a request by index asks for, 0 if it isn't such a request.

    ``docker run --gpus N`` asks for 0 to N-1, more than there are.
    """
    wanted = [str(number) for number in range(len(selectors))]
    whole = {*range(len(indices))} == {*indices}
    return len(wanted) if whole and len(wanted) > len(indices) > 0 and [*selectors] == wanted else 0


def similar(word: str, known: "Iterable[str]", likeness: float = _LIKENESS) -> "list[str]":
    """Return at most three known words similar to a misspelt one, the likeliest first.

    ``likeness`` is the minimum similarity, 0 to 1 (difflib's ratio).
    """
    from difflib import get_close_matches  # noqa: PLC0415 - only for commands

    return get_close_matches(word, sorted(set(known)), cutoff=likeness)


def did_you_mean(words: "list[str]") -> str:
    """Return a question with a leading blank, "" for no words."""
    return f" Did you mean {' or '.join(words)}?" if words else ""

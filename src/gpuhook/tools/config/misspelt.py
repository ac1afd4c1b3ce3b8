"""Suggestions for misspelt words."""

from collections.abc import Iterable
from difflib import get_close_matches

_LIKENESS = 0.7


def similar(word: str, known: Iterable[str], likeness: float = _LIKENESS) -> list[str]:
    """Return at most three known words similar to a misspelt one, the likeliest first.

    ``likeness`` is the minimum similarity, 0 to 1 (difflib's ratio).
    """
    return get_close_matches(word, sorted(set(known)), cutoff=likeness)


def did_you_mean(words: list[str]) -> str:
    """Return a question with a leading blank, "" for no words."""
    return f" Did you mean {' or '.join(words)}?" if words else ""

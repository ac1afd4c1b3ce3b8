"""What a misspelt word may have meant."""

from collections.abc import Iterable
from difflib import get_close_matches

_LIKENESS = 0.7


def similar(word: str, known: Iterable[str], likeness: float = _LIKENESS) -> list[str]:
    """Return at most three that a misspelt word may have meant, the likeliest first.

    ``likeness`` is what they have at least, 0 to 1 (difflib's ratio).
    """
    return get_close_matches(word, sorted(set(known)), cutoff=likeness)


def did_you_mean(words: list[str]) -> str:
    """Return a question with a blank before it, "" for no words."""
    return f" Did you mean {' or '.join(words)}?" if words else ""

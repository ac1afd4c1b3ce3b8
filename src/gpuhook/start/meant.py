"""What a request that is refused may have meant: nothing that a start that succeeds imports."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

_SEPARATORS = str.maketrans(";|\t\n\r ", ",,,,,,")
# Quotes and brackets: who writes NAME="0,1" into a compose file's list has them in the value.
_AROUND = str.maketrans("", "", "\"'`[](){}")
_SHOWN = 48  # characters


def separated(names: "Sequence[str]") -> str:
    """Return names that can't be devices' as a comma list that can, "" where that isn't it."""
    text = ",".join(names).translate(_AROUND).translate(_SEPARATORS)
    words = [word for word in text.split(",") if word]
    return ",".join(words) if words and len(text) <= _SHOWN else ""


def counted(selectors: "Sequence[str]", indices: "Collection[int]") -> int:
    """Return how many devices are asked for by number, 0 where it isn't so.

    It is where they are 0 to one that is too many, as ``docker run --gpus N`` asks.
    """
    wanted = [str(number) for number in range(len(selectors))]
    whole = {*range(len(indices))} == {*indices}
    return len(wanted) if whole and len(wanted) > len(indices) > 0 and [*selectors] == wanted else 0

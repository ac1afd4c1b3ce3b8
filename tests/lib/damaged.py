"""JSON values that are damaged in one place, for readers of saved data."""

import copy
from collections.abc import Iterator
from typing import Any

_WRONG = (1.5, [1.5], {"x": 1.5})  # values that are valid nowhere in gpuhook's saved data


def every(value: Any, most: int = 2) -> Iterator[Any]:
    """Yield copies of a value, each with a wrong value in one place.

    Of each list, only the first ``most`` items are changed.
    """
    for place in _places(value, most):
        for new in _WRONG:
            made = copy.deepcopy([value])
            *way, last = [0, *place]
            within: Any = made
            for key in way:
                within = within[key]
            within[last] = new
            yield made[0]


def without(value: dict[str, Any], *keys: str) -> Iterator[dict[str, Any]]:
    """Yield copies of an object, each without one of the keys."""
    yield from ({key: each for key, each in value.items() if key != gone} for gone in keys)


def _places(value: Any, most: int, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield place
    inner = dict(enumerate(value[:most])) if isinstance(value, list) else value
    for key, each in inner.items() if isinstance(inner, dict) else ():
        yield from _places(each, most, (*place, key))

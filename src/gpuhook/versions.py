"""Version numbers, dot-separated and compared number by number.

Hot path: imports nothing.
"""

_LIMIT = 64  # characters; no real version is a third as long


def parse(text: str) -> tuple[int, ...] | None:
    """Return a version's numbers, trailing zeros dropped (9 = 9.0), None if it is none."""
    if len(text) > _LIMIT:
        return None
    parts = text.split(".")
    if not all(part.isascii() and part.isdecimal() for part in parts):
        return None
    numbers = [int(part) for part in parts]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)

"""How a value that came from an image or a user appears in a message: short and escaped.

Hot path: imports nothing.
"""

LIMIT = 48  # characters of a foreign value that a message shows


def shown(value: object) -> str:
    """Return ``value`` in quotes, ASCII only, control characters escaped, cut at LIMIT."""
    try:
        text = value if isinstance(value, str) else str(value)
    except (ValueError, RecursionError):  # more digits or levels than Python prints
        text = type(value).__name__
    if len(text) <= LIMIT:
        return ascii(text)
    return f"{text[:LIMIT]!a}... ({len(text)} characters)"


def listed(values: "tuple[str, ...] | list[str]", limit: int = 8) -> str:
    """Return at most ``limit`` values joined by commas, and how many more there are."""
    head = ", ".join(values[:limit])
    more = len(values) - limit
    return f"{head} and {more} more" if more > 0 else head

"""Protocol Buffers encoded by hand, independently of gpuhook's code, for tests of gRPC services.

Only varints and length-delimited fields are supported (wire types 0 and 2). The messages of
the kubelet's and the engines' interfaces have no others.
"""

VARINT, BYTES = 0, 2

Value = int | str | bytes


def varint(number: int) -> bytes:
    """Return a number as Protocol Buffers encode it, seven bits at a time."""
    parts = []
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*parts, number])


def message(*fields: tuple[int, Value]) -> bytes:
    """Return (number, value) fields as a message; a nested message is passed as its bytes."""
    text = b""
    for number, value in fields:
        if isinstance(value, int):
            text += varint(number << 3 | VARINT) + varint(value)
        else:
            data = value.encode() if isinstance(value, str) else value
            text += varint(number << 3 | BYTES) + varint(len(data)) + data
    return text


def every(text: bytes) -> list[tuple[int, int | bytes]]:
    """Return all fields of a message as (number, value), in the message's order."""
    found: list[tuple[int, int | bytes]] = []
    at = 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = text[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(text):
        tag = number()
        if tag & 7 == VARINT:
            found.append((tag >> 3, number()))
        else:
            size = number()
            found.append((tag >> 3, text[at : at + size]))
            at += size
    return found


def fields(text: bytes) -> dict[int, int | bytes]:
    """Return a message's fields by number; for a repeated field, the last value."""
    return dict(every(text))


def messages(text: bytes, number: int) -> list[bytes]:
    """Return the values of a repeated field of messages or strings, undecoded."""
    return [value for each, value in every(text) if each == number and isinstance(value, bytes)]


def strings(text: bytes, number: int) -> list[str]:
    """Return the values of a repeated field of strings."""
    return [value.decode() for value in messages(text, number)]


def string(text: bytes, number: int) -> str:
    """Return a text field, or "" if it isn't set."""
    return (strings(text, number) or [""])[-1]


def integer(text: bytes, number: int) -> int:
    """Return an integer or boolean field, or 0 if it isn't set."""
    value = fields(text).get(number, 0)
    assert isinstance(value, int)
    return value


def mapping(text: bytes, number: int) -> dict[str, str]:
    """Return a map field whose keys and values are strings."""
    return {string(pair, 1): string(pair, 2) for pair in messages(text, number)}

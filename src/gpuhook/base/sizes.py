"""Memory sizes in human-readable form."""

from gpuhook.base.oci.jsontext import Record

_UNITS = {"": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_DIGITS = 15
_ALL = 100


class Size(Record):
    """A size of device memory: in bytes, or in ``percent`` of the device's memory.

    ``text`` is the original text.
    """

    text: str
    number: int
    percent: bool = False

    def of(self, memory: int) -> int:
        """Return the size in bytes for a device with ``memory`` bytes."""
        return memory * self.number // _ALL if self.percent else self.number


def parse_size(text: str) -> Size | None:
    """Return the size in a text, None if it is invalid; 0 and 0% are invalid."""
    word = text.strip()
    digits = len(word) - len(word.lstrip("0123456789"))
    number = int(word[:digits]) if 0 < digits <= _DIGITS and word.isascii() else 0
    unit = word[digits:].strip().lower()
    if number and unit == "%":
        return Size(word, number, percent=True) if number <= _ALL else None
    return Size(word, number * _UNITS[unit]) if number and unit in _UNITS else None


def amount(number: int) -> str:
    """Return bytes in human-readable form, exactly: 8GiB, 1536MiB, 1000 bytes."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        step = _UNITS[unit.lower()]
        if number >= step and number % step == 0:
            return f"{number // step}{unit}"
    return f"{number} bytes"

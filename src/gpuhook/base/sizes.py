"""Memory sizes in human-readable form, and Kubernetes' quantities."""

from gpuhook.base.oci.jsontext import Record

_UNITS = {"": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_DIGITS = 15
_ALL = 100
# Suffixes of Kubernetes' quantities -> factor.
_SUFFIXES = {
    "": 1,
    **{f"{letter}i": 1 << 10 * power for power, letter in enumerate("KMGTPE", start=1)},
    **{letter: 10 ** (3 * power) for power, letter in enumerate("kMGTPE", start=1)},
}
_QUANTITY_DIGITS = 20  # before the point, and after it
_LARGEST_QUANTITY = 1 << 60


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


def parse_quantity(text: object) -> int | None:
    """Return a Kubernetes quantity (8Gi, 500M, 1e9, 17) as a whole number over 0, else None.

    Fractions are rounded up. Source: apimachinery's pkg/api/resource/quantity.go.
    """
    if isinstance(text, bool) or not isinstance(text, (str, int)):
        return None
    word = str(text)
    if not word.isascii() or len(word) > 2 * _QUANTITY_DIGITS + 4:
        return None
    number = word.rstrip("KMGTPEkie")
    suffix = word[len(number) :]
    for letter in "eE":
        mantissa, found, exponent = word.partition(letter)
        if found and 0 < len(exponent) <= 2 and exponent.isdecimal():
            return _whole(mantissa, 10 ** int(exponent))
    return _whole(number, _SUFFIXES[suffix]) if suffix in _SUFFIXES else None


def _whole(number: str, factor: int) -> int | None:
    """Return a decimal fraction times a factor, rounded up; None if it is 0, or no fraction."""
    whole, point, part = number.partition(".")
    digits = (whole, part) if point else (whole,)
    if not all(each.isdecimal() and len(each) <= _QUANTITY_DIGITS for each in digits):
        return None
    found = -(-int(whole + part) * factor // 10 ** len(part))
    return found if 0 < found <= _LARGEST_QUANTITY else None


def amount(number: int) -> str:
    """Return bytes in human-readable form, exactly: 8GiB, 1536MiB, 1000 bytes."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        step = _UNITS[unit.lower()]
        if number >= step and number % step == 0:
            return f"{number // step}{unit}"
    return f"{number} bytes"

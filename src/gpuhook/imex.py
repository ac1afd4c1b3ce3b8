"""IMEX channel numbers: the strict grammar for what names /dev/nvidia-caps-imex-channels/*.

Hot path: imports nothing heavy.
"""

from gpuhook.errors import RequestError
from gpuhook.quoting import shown

CHANNELS = 1 << 20  # the driver makes channels 0 to 1048575
_DIGITS = len(str(CHANNELS))


def channel(text: str) -> int:
    """Return a channel's number; RequestError for all but plain decimal digits in range."""
    plain = text.isascii() and text.isdecimal() and len(text) <= _DIGITS
    if plain and (text == "0" or text[0] != "0") and int(text) < CHANNELS:
        return int(text)
    raise RequestError(
        f"{shown(text)} is not an IMEX channel",
        f"Ask for channels by number, 0 to {CHANNELS - 1}, in NVIDIA_IMEX_CHANNELS",
    )


def channels(names: tuple[str, ...] | None) -> tuple[int, ...]:
    """Return the numbers in order, once each; of nothing, ``none`` and ``all`` none.

    ``all`` names no channel in particular: which exist is a matter of the whole rack.
    """
    if names is None or names == ("all",):
        return ()
    return tuple(dict.fromkeys(channel(name) for name in names))

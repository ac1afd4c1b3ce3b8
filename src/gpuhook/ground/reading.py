"""What others have written is read to a limit: a file may be of any size."""

import os

_PIECE = 1 << 16  # bytes at once, because files in /proc/sys refuse to be read by the megabyte


def read_start(fd: int, most: int) -> bytes:
    """Return what there is to read of an open file, at most that many bytes."""
    pieces, size = [], 0
    while size < most and (piece := os.read(fd, min(_PIECE, most - size))):
        pieces.append(piece)
        size += len(piece)
    return b"".join(pieces)

"""Standard output and error of our commands, which a caller may have closed, or filled."""

import contextlib
import errno
import io
import os
import sys
from collections.abc import Iterator

# What write(2) says of where standard output leads. Of other files, our own errors name them.
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE)


@contextlib.contextmanager
def written(program: str) -> Iterator[None]:
    """Have both be there for a block, and what it prints be written at its end.

    Where standard output can't be written it says so in one sentence, unless its reader has ended
    before (head), and exits with status 1.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed: a file that is opened next had its number
            setattr(sys, name, _nowhere())
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.filename is not None or error.errno not in _UNWRITABLE:
            raise
        sys.stdout = _nowhere()  # Python flushes it at its end
        if error.errno != errno.EPIPE:
            sys.stderr.write(
                f"{program}: Standard output can't be written: {error.strerror}. "
                "See where it leads.\n"
            )
        raise SystemExit(1) from error


def _nowhere() -> io.TextIOWrapper:
    return io.TextIOWrapper(open(os.devnull, "wb"))

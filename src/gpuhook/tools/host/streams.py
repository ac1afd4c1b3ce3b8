"""How our commands end; their standard output and error may be closed, or full."""

import atexit
import codecs
import contextlib
import errno
import io
import os
import sys
from collections.abc import Callable, Iterator
from typing import NoReturn

from gpuhook.ground.errors import printable

# What write(2) says of where standard output leads. Of other files, our own errors name them.
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE)
_ODD = "gpuhook.odd"


def _odd(error: UnicodeError) -> tuple[str | bytes, int]:
    """Have the bytes of a file's name be written as they are, other characters as escapes."""
    try:
        return codecs.lookup_error("surrogateescape")(error)
    except UnicodeError:
        return codecs.backslashreplace_errors(error)


codecs.register_error(_ODD, _odd)


def run(program: str, command: Callable[[], object]) -> NoReturn:
    """Carry out a program's command, and end this process with the status that it exits with.

    A file that the command can't use, and has no better words for, is named with status 1.
    Python isn't taken apart, which takes a sixth of a short command's time. Threads end with it.
    """
    try:
        with written(program), _named(program):
            command()
            sys.exit()
    except SystemExit as error:
        status = 0 if error.code is None else error.code
        if not isinstance(status, int):
            raise  # Python prints it
    atexit._run_exitfuncs()  # noqa: SLF001 - what others have left for the end
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # there is nowhere left to say so
            stream.flush()
    os._exit(status & 0xFF)


@contextlib.contextmanager
def written(program: str) -> Iterator[None]:
    """Have both be there for a block, and what it prints be written at its end.

    What standard output's encoding doesn't have fails nothing. Where it can't be written at all it
    says so in one sentence, unless its reader has ended before (head), and exits with status 1.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed: a file that is opened next had its number
            setattr(sys, name, _nowhere())
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors=_ODD)
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


@contextlib.contextmanager
def _named(program: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if not isinstance(error.filename, str | bytes):
            raise
        path = printable(os.fsdecode(error.filename))
        sys.stderr.write(
            f"{program}: {path} can't be used: {error.strerror}. See what is there, and who may "
            "use it.\n"
        )
        raise SystemExit(1) from error


def _nowhere() -> io.TextIOWrapper:
    return io.TextIOWrapper(open(os.devnull, "wb"))

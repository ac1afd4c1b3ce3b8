"""Exit of gpuhook's commands, with handling of a closed or full standard output and error."""

import atexit
import codecs
import contextlib
import errno
import io
import os
import sys
from collections.abc import Callable, Iterator
from typing import NoReturn

from gpuhook.base.errors import printable

# Errors of write(2) for standard output. Errors of other files have their names.
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE)
_ODD = "gpuhook.odd"


def _odd(error: UnicodeError) -> tuple[str | bytes, int]:
    """Write the bytes of a file's name unchanged, and other unencodable characters as escapes."""
    try:
        return codecs.lookup_error("surrogateescape")(error)
    except UnicodeError:
        return codecs.backslashreplace_errors(error)


codecs.register_error(_ODD, _odd)


def run(program: str, command: Callable[[], object]) -> NoReturn:
    """Run a program's command, and exit with its status.

    An unhandled error of a file prints a sentence with its name and exits with status 1. Python's
    own finalization is skipped, as it takes a sixth of a short command's time. Threads are ended.
    """
    try:
        with written(program), _named(program):
            command()
            sys.exit()
    except SystemExit as error:
        status = 0 if error.code is None else error.code
        if not isinstance(status, int):
            raise  # Python prints it
    atexit._run_exitfuncs()  # noqa: SLF001 - handlers that other modules registered
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # there is nowhere left to report it
            stream.flush()
    os._exit(status & 0xFF)


@contextlib.contextmanager
def written(program: str) -> Iterator[None]:
    """Ensure that both streams exist in a block, and flush standard output at its end.

    Characters outside of standard output's encoding cause no error. If standard output can't be
    written, print one sentence, unless its reader has ended before (head), and exit with status 1.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed: the next opened file would get its number
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
                "Check where it leads.\n"
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
            f"{program}: {path} can't be used: {error.strerror}. Check that it exists, and its "
            "permissions.\n"
        )
        raise SystemExit(1) from error


def _nowhere() -> io.TextIOWrapper:
    return io.TextIOWrapper(open(os.devnull, "wb"))

"""Files are read to a limit, since others have written them, and replaced whole."""

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_PIECE = 1 << 16  # bytes at once, because files in /proc/sys refuse to be read by the megabyte
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_PRIVATE = 0o600


def read_start(fd: int, most: int) -> bytes:
    """Return what there is to read of an open file, at most that many bytes."""
    pieces, size = [], 0
    # protects: bounded-read
    while size < most and (piece := os.read(fd, min(_PIECE, most - size))):
        pieces.append(piece)
        size += len(piece)
    return b"".join(pieces)


def write_all(
    fd: int, data: bytes, write: "Callable[[int, memoryview], int] | None" = None
) -> None:
    """Write to an open file, however many calls that takes; OSError if it fails.

    ``write`` does one of them, write(2) if there is none.
    """
    view = memoryview(data)
    while view:
        view = view[(write or os.write)(fd, view) :]


def replace(
    path: str,
    data: bytes,
    temporary: str,
    *,
    folder: int | None = None,
    mode: int = _PRIVATE,
    finish: "Callable[[int], None] | None" = None,
) -> None:
    """Write a file whole or not at all; OSError if that fails, and then nothing has changed.

    ``temporary`` is another path in the same folder, where a killed run may have left something.
    Both are of the open ``folder`` if there is one. ``finish`` is given the new file's descriptor
    when all is written.
    """
    try:
        fd = _new(temporary, folder)
        try:
            write_all(fd, data)
            if mode != _PRIVATE:
                os.fchmod(fd, mode)  # whatever the umask is
            if finish is not None:
                finish(fd)
        finally:
            os.close(fd)
        os.rename(temporary, path, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        remove(temporary, folder)
        raise


def _new(path: str, folder: int | None) -> int:
    try:
        return os.open(path, _NEW, _PRIVATE, dir_fd=folder)
    except FileExistsError:
        os.unlink(path, dir_fd=folder)
        return os.open(path, _NEW, _PRIVATE, dir_fd=folder)


def remove(path: str, folder: int | None = None) -> None:
    """Remove a file, where it is there and may be removed."""
    try:
        os.unlink(path, dir_fd=folder)
    except OSError:
        pass

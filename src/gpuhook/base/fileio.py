"""Reading of untrusted files up to a limit, and atomic replacement of files."""

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_PIECE = 1 << 16  # bytes per read: files in /proc/sys refuse reads of a megabyte
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_PRIVATE = 0o600


def read_start(fd: int, most: int) -> bytes:
    """Return the content of an open file, at most that many bytes."""
    pieces, size = [], 0
    # protects: bounded-read
    while size < most and (piece := os.read(fd, min(_PIECE, most - size))):
        pieces.append(piece)
        size += len(piece)
    return b"".join(pieces)


def write_all(
    fd: int, data: bytes, write: "Callable[[int, memoryview], int] | None" = None
) -> None:
    """Write to an open file, in as many calls as necessary; OSError on failure.

    ``write`` makes one such call, by default write(2).
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
    """Write a file atomically; OSError on failure, and then nothing has changed.

    ``temporary`` is another path in the same folder; a killed process may have left a file there.
    Both are relative to the open ``folder`` if there is one. ``finish`` gets the new file's
    descriptor when all is written.
    """
    try:
        fd = _new(temporary, folder)
        try:
            write_all(fd, data)
            if mode != _PRIVATE:
                os.fchmod(fd, mode)  # regardless of the umask
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
    """Remove a file, if it exists and may be removed."""
    try:
        os.unlink(path, dir_fd=folder)
    except OSError:
        pass

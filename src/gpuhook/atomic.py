"""Replace a file whole: whoever reads it sees the old or the new one, never a half.

For files that people and engines keep (config.toml, daemon.json); config.json of a bundle
has its own writer in ``oci``.
"""

import contextlib
import os
import stat
import tempfile

from gpuhook import host_files

_NEW_MODE = 0o644


def replace(path: str, data: bytes) -> None:
    """Write ``data`` to ``path`` on disk, by a temporary file in the same folder and rename.

    Mode and owner of an existing file are kept, a symbolic link stays one and its target is
    replaced. Raises OSError, and UntrustedPathError where another user's link could lead root
    elsewhere; then nothing has changed.
    """
    host_files.check_way(path)
    path = os.path.realpath(path)
    folder = os.path.dirname(path)
    fd, temporary = tempfile.mkstemp(prefix=f".{os.path.basename(path)}.", dir=folder)
    try:
        with open(fd, "wb") as file:
            _copy_identity(path, fd)
            file.write(data)
            file.flush()
            os.fsync(fd)
        os.rename(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    _sync_folder(folder)


def _copy_identity(path: str, fd: int) -> None:
    try:
        old = os.stat(path)
    except FileNotFoundError:
        os.fchmod(fd, _NEW_MODE)
        return
    # The owner first: a change of owner takes the set-id bits away.
    os.fchown(fd, old.st_uid, old.st_gid)
    os.fchmod(fd, stat.S_IMODE(old.st_mode))


def _sync_folder(folder: str) -> None:
    """Make the new name last through a power cut."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

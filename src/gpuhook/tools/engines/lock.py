"""Exclusive lock of a folder, held by one process at a time, with a bounded wait.

Other users have no access to the folder, because a user who can open a file can lock it.
"""

import contextlib
import os
import stat
import time
from collections.abc import Iterator

from gpuhook.base.errors import GpuhookError
from gpuhook.base.host import files as host_files
from gpuhook.base.host import lock
from gpuhook.tools.engines.files import make_folders, remove_folders

NAME = "lock"  # the file in the folder
_FOLDER_MODE = 0o700  # protects: state-folder
_ATTEMPTS = 100
_ID_DIGITS = 20


class Lock:
    """A lock in a folder, which is created for it and removed with it if empty.

    ``doing`` describes the holder's action for messages, ``patience`` is the timeout of other
    processes in seconds, ``error`` is the exception that they raise then.
    """

    def __init__(self, folder: str, doing: str, patience: float, error: type[GpuhookError]) -> None:
        self._folder = folder
        self._doing = doing
        self._patience = patience
        self._error = error
        self._file = os.path.join(folder, NAME)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock; ``error`` if another process holds it too long, or if it fails."""
        made = {os.path.dirname(self._folder), self._folder}
        fd = self._lock(made, time.monotonic() + self._patience)
        try:
            yield
        finally:
            os.unlink(self._file)
            remove_folders(sorted(made))
            os.close(fd)

    def _lock(self, made: set[str], end: float) -> int:
        """Lock the file, which the previous holder may have removed meanwhile.

        The folders created for it are added to ``made``. The process that holds the lock writes
        its id into the file.
        """
        while True:
            fd = self._open(made)
            if not lock.take(fd, end - time.monotonic()):
                raise self._held_too_long(fd)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), os.stat(self._file)):
                    with contextlib.suppress(
                        OSError
                    ):  # such as a full disk: it is only for messages
                        os.pwrite(fd, str(os.getpid()).encode(), 0)
                    return fd
            os.close(fd)

    def _open(self, made: set[str]) -> int:
        host_files.check_way(self._folder)
        attempts = _ATTEMPTS
        while True:
            attempts -= 1
            try:
                made.update(make_folders(self._folder))
                if stat.S_IMODE(os.stat(self._folder).st_mode) != _FOLDER_MODE:
                    os.chmod(self._folder, _FOLDER_MODE)
                flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                return os.open(self._file, flags, 0o600)
            except OSError as error:
                # The previous holder removes the folders.
                if isinstance(error, FileNotFoundError) and attempts:
                    continue
                raise self._unusable(error) from None

    def _unusable(self, error: OSError) -> GpuhookError:
        return self._error(
            f"The state folder {self._folder} can't be used: {error.strerror}",
            host_files.remedy(error, "Run this as root, or name another folder with --state-dir"),
        )

    def _held_too_long(self, fd: int) -> GpuhookError:
        """Return an error that names the holder of the lock, and close the file."""
        holder = os.pread(fd, _ID_DIGITS, 0).decode("ascii", "replace")
        os.close(fd)
        return self._error(
            f"The process {holder or '(unknown)'} has been {self._doing} for more "
            f"than {self._patience:.0f} seconds: it has locked {self._file}",
            "Wait until it has exited, or kill it if it hangs, and run this again",
        )

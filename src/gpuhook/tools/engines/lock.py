"""The right to change something that has one folder: one process at a time, and nobody waits long.

Nobody else may look into that folder: who can open a file can lock it.
"""

import contextlib
import os
import stat
import time
from collections.abc import Iterator

from gpuhook.ground.errors import GpuhookError
from gpuhook.ground.host import files as host_files
from gpuhook.ground.host import lock
from gpuhook.tools.engines.files import make_folders, remove_folders

NAME = "lock"  # of the file in the folder
_FOLDER_MODE = 0o700  # protects: state-folder
_ATTEMPTS = 100
_ID_DIGITS = 20


class Lock:
    """A lock in a folder, which is made for it and goes with it where it is empty then.

    ``doing`` says what whoever holds it does, ``patience`` for how many seconds others wait,
    ``error`` is what they raise then.
    """

    def __init__(self, folder: str, doing: str, patience: float, error: type[GpuhookError]) -> None:
        self._folder = folder
        self._doing = doing
        self._patience = patience
        self._error = error
        self._file = os.path.join(folder, NAME)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock; ``error`` if somebody else does so for too long, or it can't be made."""
        made = {os.path.dirname(self._folder), self._folder}
        fd = self._lock(made, time.monotonic() + self._patience)
        try:
            yield
        finally:
            os.unlink(self._file)
            remove_folders(sorted(made))
            os.close(fd)

    def _lock(self, made: set[str], end: float) -> int:
        """Lock the file; whoever held the lock before has removed it meanwhile.

        The folders that had to be made for it are added to ``made``. The process that holds
        the lock writes its id into the file.
        """
        while True:
            fd = self._open(made)
            if not lock.take(fd, end - time.monotonic()):
                raise self._held_too_long(fd)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), os.stat(self._file)):
                    with contextlib.suppress(OSError):  # a full disk, and it only tells others
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
                # Whoever held the lock removes the folders.
                if isinstance(error, FileNotFoundError) and attempts:
                    continue
                raise self._unusable(error) from None

    def _unusable(self, error: OSError) -> GpuhookError:
        return self._error(
            f"The state folder {self._folder} can't be used: {error.strerror}",
            host_files.remedy(error, "Run this as root, or name another folder with --state-dir"),
        )

    def _held_too_long(self, fd: int) -> GpuhookError:
        """Return an error that names who holds the lock; closes the file."""
        holder = os.pread(fd, _ID_DIGITS, 0).decode("ascii", "replace")
        os.close(fd)
        return self._error(
            f"The process {holder or '(unknown)'} has been {self._doing} for more "
            f"than {self._patience:.0f} seconds: it has locked {self._file}",
            "Wait until it has ended, or end it if it hangs, and run this again",
        )

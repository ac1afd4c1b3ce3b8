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
from gpuhook.base.state_directory import StateDirectory
from gpuhook.base.state_directory import StateLock as HeldLock
from gpuhook.tools.engines.files import make_folders, remove_folders

NAME = "lock"  # the file in the folder
_FOLDER_MODE = 0o700  # protects: state-folder
_ATTEMPTS = 100
_ID_DIGITS = 20


class FolderLock:
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
        with self._take(made, time.monotonic() + self._patience):
            try:
                yield
            finally:
                os.unlink(self._file)
                remove_folders(sorted(made))

    def _take(self, made: set[str], end: float) -> HeldLock:
        """Lock the file, whose folder the previous holder may have removed meanwhile.

        The folders created for it are added to ``made``. The process that holds the lock writes
        its id into the file.
        """
        host_files.check_way(self._folder)
        attempts = _ATTEMPTS
        while True:
            attempts -= 1
            try:
                made.update(make_folders(self._folder))
                if stat.S_IMODE(os.stat(self._folder).st_mode) != _FOLDER_MODE:
                    os.chmod(self._folder, _FOLDER_MODE)
                with StateDirectory.opened(self._folder) as folder:
                    lock = folder.lock(NAME, end - time.monotonic())
            except TimeoutError:
                raise self._held_too_long() from None
            except OSError as error:
                if isinstance(error, FileNotFoundError) and attempts:
                    continue
                raise self._unusable(error) from None
            with contextlib.suppress(OSError):  # such as a full disk: it is only for messages
                os.pwrite(lock.fd, str(os.getpid()).encode(), 0)
            return lock

    def _unusable(self, error: OSError) -> GpuhookError:
        return self._error(
            f"The state folder {self._folder} can't be used: {error.strerror}",
            host_files.remedy(error, "Run this as root, or name another folder with --state-dir"),
        )

    def _held_too_long(self) -> GpuhookError:
        """Return an error that names the holder of the lock."""
        holder = b""
        with contextlib.suppress(OSError):
            holder = host_files.read_start(self._file, _ID_DIGITS)
        return self._error(
            f"The process {holder.decode('ascii', 'replace') or '(unknown)'} has been "
            f"{self._doing} for more than {self._patience:.0f} seconds: it has locked {self._file}",
            "Wait until it has exited, or kill it if it hangs, and run this again",
        )

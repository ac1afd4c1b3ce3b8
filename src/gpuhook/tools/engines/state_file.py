"""JSON files in the state folder of commands, by default /var/lib/gpuhook.

Root writes and removes what they name, so they count only if no other user can have written them.
Unlike the state directory of containers' starts (``base.state_directory``), this folder survives
reboots, and may be below a prefix or a link: its files are named by paths that are checked each
time, and writes survive a power loss. ``store`` and ``hpc.rootfs.record`` keep journals in formats
of their own, which a crash may cut.
"""

import contextlib
import json
import os
from collections.abc import Callable
from typing import Any, TypeVar

from gpuhook.base.errors import GpuhookError
from gpuhook.base.host import files as host_files
from gpuhook.tools.engines.files import make_folders

_MISSING = (FileNotFoundError, NotADirectoryError)

T = TypeVar("T")


class StateFile:
    """One such file; problems are raised as ``error``, with ``remedy`` for a damaged file."""

    def __init__(
        self, path: str, error: type[GpuhookError], remedy: str, *, mode: int = 0o600
    ) -> None:
        self.path = path
        self._error = error
        self._remedy = remedy
        self._mode = mode

    def load(self, make: Callable[[Any], T]) -> T | None:
        """Return what ``make`` makes of the JSON value in it, None if there is no file.

        ``make`` may raise ValueError, TypeError, LookupError and AttributeError for a value of a
        wrong form. UntrustedPathError if a non-root user can have written the file.
        """
        try:
            found = host_files.read_roots(self.path)  # protects: kept-writers
            return make(json.loads(found))
        except _MISSING:
            return None
        except OSError as error:
            raise self._error(
                f"{self.path} can't be read: {error.strerror}", "Run this as root"
            ) from None
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise self._error(f"{self.path} is damaged: {error}", self._remedy) from None

    def save(self, value: object) -> None:
        """Write it with this JSON value."""
        try:
            host_files.check_way(self.path)
            make_folders(os.path.dirname(self.path))
            data = json.dumps(value, indent=2).encode() + b"\n"
            host_files.replace(self.path, data, self._mode)
        except OSError as error:
            raise self._unwritable(error) from None

    def remove(self) -> None:
        """Remove it, if it exists."""
        try:
            host_files.check_way(self.path)
            with contextlib.suppress(*_MISSING):
                os.unlink(self.path)
        except OSError as error:
            raise self._unwritable(error) from None

    def _unwritable(self, error: OSError) -> GpuhookError:
        remedy = "Run this as root, or name another folder with --state-dir"
        return self._error(
            f"{self.path} can't be written: {error.strerror}", host_files.remedy(error, remedy)
        )

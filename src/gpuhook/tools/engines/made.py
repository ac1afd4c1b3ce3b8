"""Folders that were made for files of gpuhook, and that go when they are empty again.

One list in the state folder for engines' files, links and CDI documents: a folder that was made for
one file may hold another's by the time that the first is removed.
"""

import contextlib
import json
import os
from collections.abc import Iterable

from gpuhook.ground.errors import EngineError
from gpuhook.ground.host import files as host_files
from gpuhook.tools.engines.files import make_folders, missing_folders, remove_folders
from gpuhook.tools.engines.prefix import check_kept

NAME = "folders.json"  # in the state folder
_MODE = 0o600


class MadeFolders:
    """The list in one state folder, of folders below ``prefix`` where that stands for / ."""

    def __init__(self, state: str, prefix: str = "") -> None:
        self._path = os.path.join(state, NAME)
        self._prefix = prefix

    def paths(self) -> list[str]:
        """Return the folders, outermost first; EngineError for a list that is damaged."""
        try:
            host_files.check_way(self._path)
            found = json.loads(host_files.read(self._path))
            if not isinstance(found, list) or not all(isinstance(path, str) for path in found):
                raise ValueError("it isn't a list of paths")
        except (FileNotFoundError, NotADirectoryError):
            return []
        except (OSError, ValueError, RecursionError) as error:
            raise EngineError(
                f"{self._path} is damaged: {error}",
                "Remove it; folders that gpuhook made and that are empty stay then",
            ) from None
        for path in found:
            check_kept(self._prefix, self._path, path)
        return sorted(found)

    def make(self, path: str) -> None:
        """Make a folder and the missing ones above it; OSError, and then none of them is left."""
        self.expect(path)
        try:
            make_folders(path)
        except OSError:
            self.tidy()
            raise

    def expect(self, path: str) -> None:
        """Remember the missing folders on the way to one that is about to be made."""
        self.add(missing_folders(path))

    def add(self, paths: Iterable[str]) -> None:
        """Remember folders that were made by us."""
        known = self.paths()
        self._save(known, sorted({*known, *paths}))

    def tidy(self) -> None:
        """Remove the folders in which nothing is left, and forget them."""
        known = self.paths()
        remove_folders(known)
        self._save(known, [path for path in known if os.path.isdir(path)])

    def keep_above(self, state: str, paths: Iterable[str], *, is_used: bool) -> None:
        """Remember the folders above the state folder while anything else is remembered in it."""
        known = self.paths()
        others = [path for path in known if not state.startswith(f"{path}/")]
        self._save(known, sorted({*others, *paths}) if others or is_used else [])

    def forget(self) -> None:
        """Forget the folders that others use by now: nothing of ours is left in any."""
        self.tidy()
        self._save(self.paths(), [])

    def _save(self, before: list[str], paths: list[str]) -> None:
        if paths == before:
            return
        try:
            if paths:
                os.makedirs(os.path.dirname(self._path), exist_ok=True)
                host_files.replace(self._path, json.dumps(paths, indent=2).encode(), _MODE)
            else:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._path)
        except OSError as error:
            raise EngineError(
                f"{self._path} can't be written: {error.strerror}",
                host_files.remedy(
                    error, "Run this as root, or name another folder with --state-dir"
                ),
            ) from None

"""Record of folders that gpuhook created, and that are removed when they are empty again.

One list in the state folder covers engines' files, links and CDI specs: a folder created for one
file may contain another one when the first is removed.
"""

import contextlib
import json
import os
from collections.abc import Iterable

from gpuhook.base.errors import EngineError
from gpuhook.base.host import files as host_files
from gpuhook.tools.engines.files import make_folders, missing_folders, remove_folders
from gpuhook.tools.engines.prefix import check_kept

NAME = "folders.json"  # in the state folder
_MODE = 0o600


class MadeFolders:
    """The list in one state folder, of folders below ``prefix`` if that is used as / ."""

    def __init__(self, state: str, prefix: str = "") -> None:
        self._path = os.path.join(state, NAME)
        self._prefix = prefix

    def paths(self) -> list[str]:
        """Return the folders, outermost first; EngineError for a damaged list."""
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
                "Remove it; empty folders that gpuhook created will then stay",
            ) from None
        for path in found:
            check_kept(self._prefix, self._path, path)
        return sorted(found)

    def make(self, path: str) -> None:
        """Create a folder and its missing parents; OSError if it fails, with none of them left."""
        self.expect(path)
        try:
            make_folders(path)
        except OSError:
            self.tidy()
            raise

    def expect(self, path: str) -> None:
        """Record a folder that is about to be created, and its missing parents."""
        self.add(missing_folders(path))

    def add(self, paths: Iterable[str]) -> None:
        """Record folders that we created."""
        known = self.paths()
        self._save(known, sorted({*known, *paths}))

    def tidy(self) -> None:
        """Remove the empty folders from disk and from the list."""
        known = self.paths()
        remove_folders(known)
        self._save(known, [path for path in known if os.path.isdir(path)])

    def keep_above(self, state: str, paths: Iterable[str], *, is_used: bool) -> None:
        """Record the parents of the state folder while it contains any other record."""
        known = self.paths()
        others = [path for path in known if not state.startswith(f"{path}/")]
        self._save(known, sorted({*others, *paths}) if others or is_used else [])

    def forget(self) -> None:
        """Drop the folders that others use now: none contains a file of ours."""
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

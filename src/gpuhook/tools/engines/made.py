"""Record of folders that gpuhook created, and that are removed when they are empty again.

One list in the state folder covers engines' files, links and CDI specs: a folder created for one
file may contain another one when the first is removed.
"""

import os
from collections.abc import Iterable
from typing import Any

from gpuhook.base.errors import EngineError
from gpuhook.tools.engines.files import make_folders, missing_folders, remove_folders
from gpuhook.tools.engines.prefix import check_kept
from gpuhook.tools.engines.state_file import StateFile

NAME = "folders.json"  # in the state folder


class MadeFolders:
    """The list in one state folder, of folders below ``prefix`` if that is used as / ."""

    def __init__(self, state: str, prefix: str = "") -> None:
        remedy = "Remove it; empty folders that gpuhook created will then stay"
        self._file = StateFile(os.path.join(state, NAME), EngineError, remedy)
        self._prefix = prefix

    def paths(self) -> list[str]:
        """Return the folders, outermost first; EngineError for a damaged list."""
        found = self._file.load(_paths) or []
        for path in found:
            check_kept(self._prefix, self._file.path, path)
        return found

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
        if paths and paths != before:
            self._file.save(paths)
        elif before and not paths:
            self._file.remove()


def _paths(found: Any) -> list[str]:
    if not isinstance(found, list) or not all(isinstance(path, str) for path in found):
        raise ValueError("it isn't a list of paths")
    return sorted(found)

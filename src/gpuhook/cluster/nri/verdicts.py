"""Verdicts on containers, written for the runtime and the hook (``core.verdict``)."""

import os
import time

from gpuhook.base.errors import PluginError
from gpuhook.base.oci import jsontext
from gpuhook.base.state_directory import StateDirectory
from gpuhook.core.records import records
from gpuhook.core.verdict import FOLDER, Verdict, is_id

_KEPT = 3600.0  # seconds: an engine starts a new container at once, and never reuses its id
_SWEEP = 60.0  # seconds between two searches for outdated verdicts


class Verdicts:
    """The folder of verdicts, which is made with the first one."""

    def __init__(self) -> None:
        self._swept = 0.0

    def write(self, state_dir: str, container: str, verdict: Verdict) -> None:
        """Write a verdict; PluginError if that fails, so that the container isn't started."""
        if not is_id(container):
            raise PluginError(
                "The engine's id of the container is invalid", "Check the engine's version"
            )
        body = jsontext.dumps(verdict.to_json()).encode()
        try:
            with _open(state_dir) as folder:
                folder.write_checked(container, body, 0o600)
                self._sweep(folder, state_dir)
        except OSError as error:
            raise _unwritable(state_dir, error) from None

    def _sweep(self, folder: StateDirectory, state_dir: str) -> None:
        """Remove outdated verdicts, unless their container is running."""
        now = time.time()
        if abs(now - self._swept) < _SWEEP:
            return
        self._swept = now
        running: set[str] | None = None
        for name in folder.names():
            try:
                made = os.stat(name, dir_fd=folder.fd, follow_symlinks=False).st_mtime
            except FileNotFoundError:
                continue
            if abs(now - made) <= _KEPT:
                continue
            if running is None:
                running = {str(each.get("id")) for each in records.read_all(state_dir)}
            if name not in running:
                folder.remove(name)


def _open(state_dir: str) -> StateDirectory:
    """Open the folder, which only root may enter; it is made if it doesn't exist."""
    parent = StateDirectory.make(state_dir)
    if parent is None:
        raise PluginError(
            f"The gate can't write verdicts: {state_dir} can't be used, or others may write to it",
            "Correct state-dir in [gpuhook]",
        )
    try:
        with parent:
            return parent.folder(FOLDER, make=True, private=True)
    except OSError as error:
        raise _unwritable(state_dir, error) from None


def _unwritable(state_dir: str, error: OSError) -> PluginError:
    return PluginError(
        f"The gate can't write verdicts to {state_dir}/{FOLDER}: {error.strerror}",
        "Make space for them, or correct the folder",
    )

"""Whose files a command changes, and where it is kept what was changed."""

import os

from gpuhook.tools.engines.files import DEFAULT_STATE


def is_rootless(prefix: str) -> bool:
    """Tell whether the user's own files are meant and not the system's."""
    return os.geteuid() != 0 and not prefix


def state_folder(given: str | None, prefix: str) -> str:
    """Return where it is kept what was changed."""
    if given:
        return os.path.abspath(given)
    if is_rootless(prefix):
        base = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
        return os.path.join(base, "gpuhook")
    return prefix.rstrip("/") + DEFAULT_STATE

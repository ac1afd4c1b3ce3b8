"""Whose files a command changes, and where it is kept what was changed."""

import os

from gpuhook.tools.engines.files import DEFAULT_STATE, users_folder
from gpuhook.tools.engines.prefix import check_state


def is_rootless(prefix: str) -> bool:
    """Tell whether the user's own files are meant and not the system's."""
    return os.geteuid() != 0 and not prefix


def state_folder(given: str | None, prefix: str) -> str:
    """Return where it is kept what was changed; EngineError where that leads out of a prefix."""
    state = prefix.rstrip("/") + DEFAULT_STATE
    if given:
        state = os.path.abspath(given)
    elif is_rootless(prefix):
        state = os.path.join(users_folder(".local/state", "XDG_STATE_HOME"), "gpuhook")
    check_state(prefix, state)
    return state

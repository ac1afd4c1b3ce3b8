"""Locations for install and uninstall: system or user files, and the state folder."""

import os

from gpuhook.tools.engines.files import DEFAULT_STATE, users_folder
from gpuhook.tools.engines.prefix import check_state


def is_rootless(prefix: str) -> bool:
    """Tell whether to change the user's own files instead of the system's."""
    return os.geteuid() != 0 and not prefix


def state_folder(given: str | None, prefix: str) -> str:
    """Return the folder for the records of changes; EngineError if it is outside the prefix."""
    state = prefix.rstrip("/") + DEFAULT_STATE
    if given:
        state = os.path.abspath(given)
    elif is_rootless(prefix):
        state = os.path.join(users_folder(".local/state", "XDG_STATE_HOME"), "gpuhook")
    check_state(prefix, state)
    return state

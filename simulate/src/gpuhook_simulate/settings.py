"""The settings of a simulator, from ``--set``."""

from collections.abc import Mapping

from gpuhook.base.errors import SimulateError, shown


def checked(given: Mapping[str, str], known: Mapping[str, str], whose: str) -> dict[str, str]:
    """Return all settings, with defaults for those that aren't given.

    ``known`` has the defaults, and ``whose`` names the simulator for messages. SimulateError for
    an unknown setting.
    """
    if unknown := given.keys() - known:
        raise SimulateError(
            f"{whose} has no setting {shown(min(unknown))}", f"Use some of {', '.join(known)}"
        )
    return {**known, **given}

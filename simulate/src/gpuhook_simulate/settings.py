"""The settings of a simulator, as ``--set`` gives them."""

from collections.abc import Mapping

from gpuhook.ground.errors import SimulateError, shown


def checked(given: Mapping[str, str], known: Mapping[str, str], whose: str) -> dict[str, str]:
    """Return all settings, with the defaults of those that aren't given.

    ``known`` has the defaults, and ``whose`` says whose simulator it is. SimulateError for a
    setting that isn't known.
    """
    if unknown := given.keys() - known:
        raise SimulateError(
            f"{whose} has no setting {shown(min(unknown))}", f"Use some of {', '.join(known)}"
        )
    return {**known, **given}

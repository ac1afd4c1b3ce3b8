"""Errors as nvidia-container-cli words them: a class, a colon, what happened."""

from gpuhook.ground.errors import GpuhookError

# Our errors' codes -> the peer's classes, which callers look for in the text.
_CLASSES = {
    "request": "input error",
    "unsupported-capability": "input error",
    "unknown-device": "device error",
    "lost-device": "device error",
    "requirement": "requirement error",
    "config": "initialization error",
    "driver": "initialization error",
    "elf": "initialization error",
    "ldcache": "ldcache error",
    "cgroup": "mount error",
    "inject": "mount error",
}


class CliError(Exception):
    """An error of a class of the peer's."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")


def worded(error: GpuhookError) -> str:
    """Return an error of ours in the peer's form."""
    return f"{_CLASSES.get(error.code, 'container error')}: {error}"

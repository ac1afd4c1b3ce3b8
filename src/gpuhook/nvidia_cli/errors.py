"""Errors in nvidia-container-cli's form: a class, a colon, a message."""

from gpuhook.base.errors import GpuhookError

# gpuhook's error codes -> nvidia-container-cli's classes, which callers search in the text.
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
    """An error of one of nvidia-container-cli's classes."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")


def worded(error: GpuhookError) -> str:
    """Return a gpuhook error in nvidia-container-cli's form."""
    return f"{_CLASSES.get(error.code, 'container error')}: {error}"

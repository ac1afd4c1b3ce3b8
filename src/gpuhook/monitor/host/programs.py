"""Paths of gpuhook's own programs."""

import os
import shutil
import sys

from gpuhook.base.errors import EngineError


def our_program(
    name: str, remedy: str = "Reinstall gpuhook, or give its place with --runtime-path"
) -> str:
    """Return the absolute path of a gpuhook program: in gpuhook's folder, else on PATH."""
    beside = [os.path.dirname(os.path.abspath(word)) for word in (sys.argv[0], sys.executable)]
    for folder in beside:
        path = os.path.join(folder, name)
        if os.access(path, os.X_OK):
            return path
    found = shutil.which(name)
    if found is None:
        raise EngineError(
            f"The program {name} was found neither in gpuhook's folder nor on PATH",
            remedy,
        )
    return os.path.abspath(found)

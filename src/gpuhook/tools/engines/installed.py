"""Versions of installed engines, as reported by their programs."""

import re
import shutil
import subprocess

_PROGRAMS = {"docker": "dockerd"}  # the others have the engine's name
_PATIENCE = 10.0  # seconds
# After a blank, because containerd prints its module's path first, which may end in /v2.
_VERSION = re.compile(rb"\sv?(\d{1,4}\.\d[\w.+~-]*)")


def version(engine: str, prefix: str = "") -> str | None:
    """Return an engine's version, such as 26.1.5+dfsg1; None if not installed or unknown.

    Below a prefix it is unknown, too, because no program there is run.
    """
    program = None if prefix else shutil.which(_PROGRAMS.get(engine, engine))
    return version_of(program) if program else None


def version_of(program: str) -> str | None:
    """Return the version that a program reports, None if it reports none."""
    try:
        done = subprocess.run(
            [program, "--version"], capture_output=True, timeout=_PATIENCE, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    found = _VERSION.search(done.stdout)
    return found[1].decode() if found else None

"""Versions of installed engines, as reported by their programs, and how they serve ``--gpus``.

Docker before 29.2 and ctr before 2.3 call a program with NVIDIA's name. Later versions, and podman,
use CDI specs. Sources: moby's daemon/nvidia_linux.go, containerd's cmd/ctr and podman-run(1).
"""

import re
import shutil
import subprocess

from gpuhook.core.cdi import versions

_PROGRAMS = {"docker": "dockerd"}  # the others have the engine's name
_PATIENCE = 10.0  # seconds
# After a blank, because containerd prints its module's path first, which may end in /v2.
_VERSION = re.compile(rb"\sv?(\d{1,4}\.\d[\w.+~-]*)")
# Engine -> its first version that serves --gpus by CDI specs.
_GPUS_BY_CDI = {"docker": "29.2", "containerd": "2.3", "podman": "5.0"}
# Engines without --gpus before that version.
_NO_GPUS_BEFORE = ("podman",)


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


def serves_gpus_by_cdi(engine: str, version: str | None) -> bool:
    """Tell whether this version serves --gpus by CDI specs; an unknown one doesn't."""
    first = _GPUS_BY_CDI.get(engine)
    return first is not None and version is not None and not versions.is_below(version, first)


def missing_gpus(engine: str, version: str | None) -> str:
    """Return a sentence if this version has no --gpus at all, else ""."""
    if engine not in _NO_GPUS_BEFORE or version is None or serves_gpus_by_cdi(engine, version):
        return ""
    return f"{engine} {version} has no --gpus, which needs {engine} {_GPUS_BY_CDI[engine]}"

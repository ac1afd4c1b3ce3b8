"""Checks of NVIDIA's container toolkit on the host: its programs and CDI specs."""

import re
from collections.abc import Iterator

from gpuhook.base import names
from gpuhook.tools.doctor.case import Case
from gpuhook.tools.doctor.cdi import host_paths, remake
from gpuhook.tools.doctor.finding import Finding, note, ok, warning
from gpuhook.tools.doctor.host import is_ours
from gpuhook.tools.doctor.machine import Machine
from gpuhook.tools.vendors.nvidia.doctor.nodes import module_version

_PROGRAMS = (
    "nvidia-container-runtime",
    "nvidia-container-runtime-hook",
    "nvidia-container-cli",
    "nvidia-ctk",
    "nvidia-cdi-hook",
)
# Where NVIDIA's packages and the GPU Operator install them, in the order of a daemon's PATH.
_FOLDERS = (*names.SEARCH_PATH.split(":"), "/usr/local/nvidia/toolkit")
_DRIVER_LIBRARY = re.compile(r"/lib(?:cuda|nvidia-ml)\.so\.(\d+(?:\.\d+)+)$")


def cdi_versions(case: Case) -> Iterator[Finding]:
    """Compare the driver's libraries in the CDI specs with the loaded driver."""
    loaded = module_version(case)
    for path, named in host_paths(case).items():
        versions = [found[1] for found in map(_DRIVER_LIBRARY.search, named) if found]
        others = [version for version in versions if version != loaded]
        if loaded and others:
            yield warning(
                "cdi-versions",
                f"{path} is stale: it is for driver {others[0]}, and {loaded} is loaded",
                remake(case, path),
            )


def foreign_toolkit(case: Case) -> Iterator[Finding]:
    """Look for NVIDIA's own toolkit; its program names may also be links to gpuhook.

    If links to gpuhook are found before its programs, engines use gpuhook: that is a warning.
    """
    hidden = [pair for name in _PROGRAMS if (pair := _hidden(case.machine, name))]
    if hidden:
        ours, theirs = (", ".join(paths) for paths in zip(*hidden, strict=True))
        yield warning(
            "foreign-toolkit",
            f"NVIDIA's container toolkit is installed ({theirs}), but gpuhook's links are found "
            f"first: {ours}",
            "To use NVIDIA's: gpuhook install --engine docker --no-gpus, and restart Docker; to "
            "use gpuhook's: remove NVIDIA's packages",
        )
        return
    for name in _PROGRAMS:
        path = case.machine.which(name, names.SEARCH_PATH)
        if path and not is_ours(case.machine, path):
            yield note(
                "foreign-toolkit",
                f"NVIDIA's container toolkit is installed, too: {path}",
                "Use one of the two for a container; to change over, see docs/migration.md",
            )
            return
    yield ok("foreign-toolkit", "NVIDIA's container toolkit isn't installed in addition to gpuhook")


def _hidden(machine: Machine, name: str) -> tuple[str, str] | None:
    """Return our link and the program of NVIDIA's after it on a daemon's PATH; None if none is."""
    paths = [path for folder in _FOLDERS if machine.is_program(path := f"{folder}/{name}")]
    if not paths or not is_ours(machine, paths[0]):
        return None
    theirs = [path for path in paths[1:] if not is_ours(machine, path)]
    return (paths[0], theirs[0]) if theirs else None

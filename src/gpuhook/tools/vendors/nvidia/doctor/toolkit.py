"""Checks of NVIDIA's container toolkit on the host: its programs and CDI specs."""

import re
from collections.abc import Iterator

from gpuhook.base import names
from gpuhook.tools.doctor.case import Case
from gpuhook.tools.doctor.cdi import host_paths, remake
from gpuhook.tools.doctor.finding import Finding, note, ok, warning
from gpuhook.tools.doctor.host import is_ours
from gpuhook.tools.vendors.nvidia.doctor.nodes import module_version

_PROGRAMS = (
    "nvidia-container-runtime",
    "nvidia-container-runtime-hook",
    "nvidia-container-cli",
    "nvidia-ctk",
    "nvidia-cdi-hook",
)
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
    """Look for NVIDIA's own toolkit; its program names may also be links to gpuhook."""
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

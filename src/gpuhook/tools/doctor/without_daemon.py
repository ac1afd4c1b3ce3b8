"""Programs that use gpuhook and are no container engine: Slurm, enroot, Charliecloud, nspawn.

A host whose containers they start needs no engine that knows gpu-py.
"""

import os
import shlex
from collections.abc import Iterator

from gpuhook.base import names
from gpuhook.base.errors import GpuhookError, shown
from gpuhook.tools.doctor.case import Case
from gpuhook.tools.doctor.cdi import state_folder
from gpuhook.tools.doctor.finding import Finding, failure, ok
from gpuhook.tools.engines.known import ENGINES
from gpuhook.tools.engines.store import Store

# Folders of slurm.conf, next to which slurmd reads oci.conf; the last one is configless Slurm's.
_SLURM = ("/etc/slurm", "/etc/slurm-llnl", "/usr/local/etc/slurm", "/run/slurm/conf")
_FILE = "oci.conf"
_STARTS = "runtimerun="


def users(case: Case) -> list[str]:
    """Return the names of these programs that are configured to use gpuhook."""
    slurm = ["Slurm"] if any(_gpu_py(case, path) for path in _oci_files(case)) else []
    try:
        records = Store(state_folder(case)).records()
    except GpuhookError:
        records = []
    given = {record.engine for record in records}
    return slurm + [
        name for name, engine in ENGINES.items() if not engine.has_runtimes and name in given
    ]


def slurm(case: Case) -> Iterator[Finding]:
    """Check that the gpu-py of Slurm's oci.conf can be executed."""
    for path in _oci_files(case):
        program = _gpu_py(case, path)
        if program is None:
            continue
        if case.machine.is_program(program):
            yield ok("slurm-oci", f"{path} calls {program}")
        else:
            yield failure(
                "slurm-oci",
                f"{path} calls {shown(program)}, which can't be executed",
                f"Run gpuhook slurm oci --output {path}",
            )


def _oci_files(case: Case) -> list[str]:
    found = (os.path.join(folder, _FILE) for folder in _SLURM)
    return [path for path in found if case.machine.exists(path)]


def _gpu_py(case: Case, path: str) -> str | None:
    """Return the path of gpu-py in the line that starts containers, None without one."""
    for line in (case.machine.text(path) or "").split("\n"):
        if not line.lower().replace(" ", "").startswith(_STARTS):
            continue
        try:
            words = shlex.split(line.partition("=")[2].strip().strip('"'))
        except ValueError:
            continue
        for word in words:
            if os.path.isabs(word) and os.path.basename(word) == names.RUNTIME:
                return word
    return None

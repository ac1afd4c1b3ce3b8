"""Slurm's Prolog and Epilog, which slurmd runs as root for each job on a node.

A failure drains the node, so they fail only for states that only root can have caused, never a
user. Work that hangs is abandoned after a timeout. slurmd discards their output, so messages go to
the system's log.
"""

import contextlib
import os
import socket
from collections.abc import Callable, Mapping

from gpuhook.base.container import kernel
from gpuhook.base.errors import ConfigError, printable
from gpuhook.hpc.slurm import job_folder, job_groups
from gpuhook.hpc.slurm.job_groups import SlurmJob
from gpuhook.monitor.host import child

_LOG = "/dev/log"
_WARNING = "<12>"  # user.warning, RFC 5424
_LOGGING = 1.0  # seconds
_SECONDS = 40  # for a job's folder; the slow steps have their own limits

Warn = Callable[[str], None]


def job_of(environment: Mapping[str, str]) -> SlurmJob:
    """Return the job that slurmd's environment describes; ConfigError if it describes none."""
    names = ("SLURM_JOB_ID", "SLURM_JOB_UID", "SLURM_JOB_USER")
    number, uid, user = (environment.get(name, "") for name in names)
    is_number = all(each.isascii() and each.isdecimal() for each in (number, uid))
    if not is_number or not user or user.startswith(".") or "/" in user:
        raise ConfigError(
            "SLURM_JOB_ID, SLURM_JOB_UID and SLURM_JOB_USER have to be set, as slurmd sets them",
            "Run this from slurmd, as Prolog and Epilog in slurm.conf",
        )
    return SlurmJob(int(number), int(uid), user)


def prolog(path: str, job: SlurmJob, warn: Warn) -> None:
    """Create a job's folder in ``path``.

    UntrustedPathError if users can redirect the path, FolderError if it can't be created.
    """
    kernel.end_after(_SECONDS)  # reached only if the node's own filesystem hangs
    with job_folder.opened(path, make=True) as parent:
        job_folder.make(parent, path, job, warn)


def epilog(path: str, job: SlurmJob, warn: Warn) -> None:
    """Kill a job's remaining processes, and remove its folder; errors as in ``prolog``."""
    left = job_groups.end_processes(job_groups.find(job))
    if left:
        warn(f"processes of job {job.number} don't exit: {' '.join(map(str, left))}")
    # The epilog runs on all nodes of a job, the prolog only on those that it used.
    if not os.path.lexists(path):
        return
    with job_folder.opened(path) as parent:
        work = lambda: job_folder.remove(parent, path, job, warn)  # noqa: E731
        if not child.do(work, _SECONDS, warn, "epilog"):
            warn(f"the folder of job {job.number} in {path} isn't removed: it hangs")


def log(name: str, text: str) -> None:
    """Write a line to the system's log; skip it if the log doesn't accept it in time."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as to:
        to.settimeout(_LOGGING)
        to.connect(_LOG)
        to.send(f"{_WARNING}{name}: {printable(text)}".encode())

"""Slurm's Prolog and Epilog as slurmd runs them, from a folder with the package's layout."""

import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from harness.commands import Result, run
from harness.images import REPOSITORY
from harness.installation import Installation

ADA, BEA = 4401, 4402
JOB = int.from_bytes(os.urandom(3))  # random, because other sessions see the same cgroups
# Folders that may have cgroups of v1 or v2.
HIERARCHIES = [Path("/sys/fs/cgroup", name) for name in ("freezer", "unified", "")]


class Scripts:
    """The scripts in their own prefix, with the gpuhook of an installation."""

    def __init__(self, prefix: Path, installation: Installation) -> None:
        self.folder = prefix / "libexec/gpuhook/slurm"
        shutil.copytree(REPOSITORY / "packaging/slurm", self.folder)
        (prefix / "bin").mkdir()
        (prefix / "bin/gpuhook").symlink_to(installation.command)

    def call(self, script: str, folder: Path | str, user: int, job: int, *before: str) -> Result:
        """Run a script as slurmd does: without PATH, and with Slurm's variables for the job."""
        job_is = (f"SLURM_JOB_UID={user}", f"SLURM_JOB_ID={job}", f"SLURM_JOB_USER={user}")
        return run([*before, "env", "-i", *job_is, self.folder / script, folder])

    def prolog(self, folder: Path | str, user: int, job: int) -> Result:
        """Run the prolog of a user's job."""
        return self.call("prolog", folder, user, job)

    def epilog(self, folder: Path | str, user: int, job: int) -> Result:
        """Run the epilog of a user's job."""
        return self.call("epilog", folder, user, job)


@contextmanager
def made_site(workspace: Path, name: str) -> Iterator[Path]:
    """Yield a folder that belongs to root and that every user may enter."""
    site = workspace / name
    site.mkdir(mode=0o755)
    try:
        yield site
    finally:
        shutil.rmtree(site)


def as_user(user: int, *words: str | Path) -> Result:
    """Run a command as a user."""
    return run(["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", *words])


def theirs(path: Path, user: int, mode: int = 0o755) -> Path:
    """Make a folder that belongs to a user."""
    path.mkdir()
    os.chown(path, user, user)
    path.chmod(mode)
    return path


def jobs_in(folder: Path) -> list[str]:
    """Return the names of the jobs' folders; check that no removed folder is left."""
    removed = folder / ".removed"
    assert not removed.exists() or os.listdir(removed) == []
    return sorted(set(os.listdir(folder)) - {".removed"})


@contextmanager
def cgroup_of_slurm() -> Iterator[Path]:
    """Yield a cgroup for Slurm in a hierarchy, as for one of several Slurm nodes on this host."""
    top = next(each for each in HIERARCHIES if (each / "cgroup.procs").exists())
    made = top / f"slurm_{uuid4().hex[:12]}"
    made.mkdir()
    try:
        yield made
    finally:
        for state in made.glob("uid_*/job_*/freezer.state"):
            state.write_text("FROZEN")
        groups = list(made.rglob("cgroup.procs"))
        for pid in [pid for each in groups for pid in each.read_text().split()]:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        for state in made.glob("uid_*/job_*/freezer.state"):
            state.write_text("THAWED")
        end = time.monotonic() + 60
        while any(each.read_text() for each in groups) and time.monotonic() < end:
            time.sleep(0.01)
        run(["find", made, "-depth", "-type", "d", "-exec", "rmdir", "{}", "+"]).ok()

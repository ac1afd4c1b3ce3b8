"""Folder of a Slurm job's containers, created before the job and removed after it.

It is in a folder of root, and users can change only their own job's folder. Files, mounts or a full
disk that a user leaves behind never fail a start. slurmd drains a node whose prolog or epilog
fails, so they fail only for states that only root can have caused.
"""

import contextlib
import errno
import os
import stat
import time
from collections.abc import Callable, Iterator

from gpuhook.base.errors import FolderError, UntrustedPathError
from gpuhook.hpc.slurm.job_groups import SlurmJob
from gpuhook.monitor.host import users_tree

DEFAULT = "/run/slurm-containers"
_MODE = 0o711
_WAY = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_FULL = errno.ENOSPC, errno.EDQUOT
_CLEARING = 5.0  # seconds to clear the path of a new job's folder
_REMOVING = 20.0  # seconds for a job's folder
_OTHERS_LEFT = 2.0  # seconds for folders that earlier epilogs had no time for

Warn = Callable[[str], None]


def make(parent: int, path: str, job: SlurmJob, warn: Warn) -> None:
    """Create a job's folder, private to its user, in ``parent``, which is at ``path``.

    The user's existing folder is kept, because a restarted slurmd runs the prolog again.
    UntrustedPathError if root has put something else there, FolderError for other reasons.
    """
    try:
        _make(parent, path, job, warn)
    except OSError as error:
        raise _not_made(f"{path}/{job.user}.{job.number}", error) from None


def _make(parent: int, path: str, job: SlurmJob, warn: Warn) -> None:
    name = f"{job.user}.{job.number}"
    end = time.monotonic() + _CLEARING
    with contextlib.suppress(FileNotFoundError):
        users_tree.uncover(parent, name, end)
    with _bin(parent) as removed:
        if _is_strangers(parent, path, name, job):
            removed.take(name, end)
            warn(f"{path}/{name} belonged to another user: it is moved away")
        try:
            _make_folder(parent, name, removed)
        except OSError as error:
            if error.errno not in _FULL:  # protects: prolog-full
                raise
            warn(f"{path} is full, so no container of job {job.number} starts: {error.strerror}")
            return
    folder = users_tree.open_folder(parent, name)
    try:
        # It still belongs to root if an earlier prolog was killed here.
        os.fchown(folder, job.uid, -1)  # protects: job-owner
    finally:
        os.close(folder)


def _bin(parent: int) -> "contextlib.closing[users_tree.TrashFolder]":
    return contextlib.closing(users_tree.TrashFolder(parent))


def _make_folder(parent: int, name: str, removed: users_tree.TrashFolder) -> None:
    """Create a job's folder if it is missing; on a full disk, free some space first."""
    for is_last in (False, True):
        try:
            os.mkdir(name, 0o700, dir_fd=parent)
        except FileExistsError:
            pass
        except OSError as error:
            if is_last or error.errno not in _FULL:
                raise
            with contextlib.suppress(OSError):
                removed.remove_others(time.monotonic() + _OTHERS_LEFT)
            continue
        return


def _is_strangers(parent: int, path: str, name: str, job: SlurmJob) -> bool:
    """Return whether the folder belongs to another user; UntrustedPathError for no folder.

    Only root can have put a link or a file there, which is left unchanged.
    """
    try:
        folder = users_tree.open_folder(parent, name)
    except FileNotFoundError:
        return False
    except OSError:
        raise UntrustedPathError(
            f"{path}/{name} has to be a folder", "Check what root put there, and remove it"
        ) from None
    try:
        return os.fstat(folder).st_uid not in (0, job.uid)  # protects: job-strangers
    finally:
        os.close(folder)


def remove(parent: int, path: str, job: SlurmJob, warn: Warn) -> bool:
    """Remove a job's folder from ``parent``, which is at ``path``, if it exists; return True.

    What can't be removed in time is reported, and left to later calls.
    """
    name = f"{job.user}.{job.number}"
    try:
        with _bin(parent) as removed:
            with contextlib.suppress(FileNotFoundError):
                removed.take(name, time.monotonic() + _CLEARING)
            removed.remove_taken(time.monotonic() + _REMOVING)
            removed.remove_others(time.monotonic() + _OTHERS_LEFT)
    except OSError as error:
        warn(f"{path}/{name} isn't completely removed yet: {error.strerror}")
    return True


@contextlib.contextmanager
def opened(path: str, *, make: bool = False) -> Iterator[int]:
    """Open or create root's folder for jobs' folders.

    UntrustedPathError if users other than root may change a part of its path.
    """
    if not path.startswith("/") or path != os.path.normpath(path) or path.startswith("//"):
        raise _unfit(path, "isn't an absolute path")
    fd = os.open("/", _WAY)
    try:
        names = path.split("/")[1:]
        for at, name in enumerate(names):
            is_last = at == len(names) - 1
            if is_last and make:
                _make_top(fd, name, path)
            below = _below(fd, name, path, "/".join(["", *names[: at + 1]]))
            os.close(fd)
            fd = below
            _check(fd, path, "/".join(["", *names[: at + 1]]), is_last=is_last)
        yield fd
    finally:
        os.close(fd)


def _make_top(fd: int, name: str, path: str) -> None:
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, _MODE, dir_fd=fd)
    except OSError as error:
        raise _not_made(path, error) from None


def _not_made(path: str, error: OSError) -> FolderError:
    return FolderError(f"{path} can't be made: {error.strerror}", "Check its filesystem")


def _below(fd: int, name: str, path: str, part: str) -> int:
    try:
        return os.open(name, _WAY, dir_fd=fd)  # protects: jobs-folder-link
    except OSError as error:
        raise _unfit(path, f"leads through {part}: {error.strerror}") from None


def _check(fd: int, path: str, part: str, *, is_last: bool) -> None:
    status = os.fstat(fd)
    if status.st_uid != 0:  # protects: jobs-folder-owner
        raise _unfit(path, f"leads through {part}, which belongs to user {status.st_uid}")
    # In a sticky folder, such as /tmp, others can't change entries of root.
    is_sticky = status.st_mode & stat.S_ISVTX and not is_last
    if status.st_mode & _OTHERS and not is_sticky:  # protects: jobs-folder-mode
        raise _unfit(path, f"leads through {part}, which users other than root may change")


def _unfit(path: str, why: str) -> UntrustedPathError:
    return UntrustedPathError(
        f"{path} {why}",
        "Use an absolute path without links in which only root may change each part, and check "
        "what others did there",
    )

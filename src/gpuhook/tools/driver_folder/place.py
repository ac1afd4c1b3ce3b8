"""Where the driver folder is, and a folder of root's alone beside it, in which it is made.

A new one changes places with the old one in one step, so that a whole one is there at every
moment. Containers that have the old one keep it: what they have mounted is that folder,
whatever it is called by now. It goes when no container has it any more.
"""

import contextlib
import errno
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterator

from gpuhook.ground.errors import DriverFolderError
from gpuhook.ground.host import files as host_files
from gpuhook.ground.host import lock
from gpuhook.ground.host.proc import FIRST_PIDS, Mounts
from gpuhook.tools.host.namespaces import Look

MARKER = ".gpuhook-driver-folder"  # in every one that is whole
FOLDER_MODE = 0o755
_SUPERSEDED = ".gpuhook-superseded"  # in one whose place another has: the boot when that was so
_WORK = ".{}.gpuhook"  # the folder beside it

_PATIENCE = 30.0  # seconds; files are linked in fewer, and copied too
_MARKER_LIMIT = 1 << 20
_LOOK = 10.0  # seconds for a look at what is mounted; nobody waits for it
_INIT = "1"  # in no container, and not for every root to look at
_REMEDIES = {
    errno.EBUSY: "Something is mounted on it: mount the folder that it is in instead",
    errno.EINVAL: "Choose a folder on another filesystem, such as ext4, xfs or btrfs",
}


class Place:
    """The path of a driver folder."""

    def __init__(self, folder: str) -> None:
        """UntrustedPathError where another user could lead root elsewhere on the way there."""
        host_files.check_way(folder)  # protects: folder-way
        self.path = os.path.realpath(folder)
        parent, name = os.path.split(self.path)
        self._work = os.path.join(parent, _WORK.format(name))

    def check(self) -> None:
        """Raise DriverFolderError for what is there and isn't ours to replace."""
        try:
            status = os.lstat(self.path)
        except FileNotFoundError:
            return
        if stat.S_ISDIR(status.st_mode) and (self.is_whole() or not os.listdir(self.path)):
            return
        raise DriverFolderError(
            f"{self.path} exists and isn't a driver folder of gpuhook's",
            "Choose a path where nothing is yet",
        )

    def exists(self) -> bool:
        """Tell whether there is one, or what remains of one."""
        return self.is_whole() or os.path.lexists(self._work)

    def is_whole(self) -> bool:
        """Tell whether a driver folder is there."""
        return _is_whole(self.path)

    def marker(self) -> bytes:
        """Return what its maker wrote into it, b"" where there is none."""
        try:
            return host_files.read(os.path.join(self.path, MARKER), _MARKER_LIMIT)
        except OSError:
            return b""

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from changing it meanwhile; DriverFolderError if one is too long."""
        fd = self._lock(time.monotonic() + _PATIENCE)
        try:
            yield
        finally:
            os.close(fd)

    def _lock(self, end: float) -> int:
        while True:
            fd = self._open()
            if not lock.take(fd, end - time.monotonic()):
                os.close(fd)
                raise DriverFolderError(
                    f"Another process has been changing {self.path} for more than "
                    f"{_PATIENCE:.0f} seconds",
                    "Wait until it has ended, or end it if it hangs, and run this again",
                )
            with contextlib.suppress(FileNotFoundError):  # by whoever held the lock before
                if os.path.samestat(os.fstat(fd), os.lstat(self._work)):
                    return fd
            os.close(fd)

    def _open(self) -> int:
        """Open the folder beside, which nobody else may open: who could, could lock it."""
        os.makedirs(os.path.dirname(self._work), exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.mkdir(self._work, 0o700)
        host_files.check_way(self._work)  # protects: work-way
        fd = os.open(self._work, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        os.fchmod(fd, 0o700)
        return fd

    # The rest is for who holds the lock ----------------------------------------------------------

    def new_folder(self) -> str:
        """Make a folder that can take its place, with a name that no other ever had."""
        path = os.path.join(self._work, secrets.token_hex(8))
        os.mkdir(path)
        os.chmod(path, FOLDER_MODE)  # whatever the umask is
        return path

    def put(self, made: str) -> None:
        """Have a folder take its place, which is whole; DriverFolderError if it can't."""
        try:
            if os.path.lexists(self.path):
                host_files.exchange(made, self.path)
                if _is_whole(made):
                    _note_superseded(made)
            else:
                os.rename(made, self.path)
            host_files.sync_folder(os.path.dirname(self.path))
        except OSError as error:
            raise failure(self.path, error) from None

    def take_away(self) -> None:
        """Take it out of its place."""
        old = os.path.join(self._work, secrets.token_hex(8))
        try:
            os.rename(self.path, old)
            _note_superseded(old)
        except OSError as error:
            raise failure(self.path, error) from None

    def clean(self) -> int:
        """Delete older folders that no container has, and unfinished ones; return how many stay."""
        stay = 0
        for name in os.listdir(self._work):
            old = os.path.join(self._work, name)
            if _is_whole(old) and _may_be_used(old):
                stay += 1
            else:
                shutil.rmtree(old)
        return stay

    def forget(self) -> None:
        """Remove the folder beside, unless there are older ones in it."""
        with contextlib.suppress(OSError):
            os.rmdir(self._work)


def failure(path: str, error: OSError) -> DriverFolderError:
    """Return the error for what the kernel refused."""
    remedy = _REMEDIES.get(error.errno or 0, "Run this as root, where that folder can be changed")
    remedy = host_files.remedy(error, remedy)
    return DriverFolderError(f"{path} can't be set up: {error.strerror}", remedy)


def _is_whole(folder: str) -> bool:
    """Tell whether a folder is whole, and root's or our own: then it can't become another user's.

    In a folder such as /tmp a stranger may make one after ``check_way`` has found none.
    """
    try:
        status, marker = os.lstat(folder), os.lstat(os.path.join(folder, MARKER))
    except OSError:
        return False
    # protects: folder-owner
    if status.st_uid != os.geteuid() and not host_files.is_roots(status.st_uid):
        return False
    return stat.S_ISREG(marker.st_mode) and marker.st_uid == status.st_uid


# Older folders -------------------------------------------------------------------------------


def _may_be_used(old: str) -> bool:
    """Tell whether a container may have an older folder.

    After a reboot none has. Before, that can be seen by who sees every process of the machine,
    and not from within a pod. One of which nobody has noted yet when it was given up was given
    up just now, by a process that was killed: a container that is being started may have it.
    """
    try:
        boot = host_files.read(os.path.join(old, _SUPERSEDED))
    except OSError:
        _note_superseded(old)
        return True
    if boot != _boot():
        return False
    # protects: folder-in-use
    return not _sees_every_process() or _is_mounted(os.path.basename(old))


def _note_superseded(old: str) -> None:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        host_files.replace(os.path.join(old, _SUPERSEDED), _boot())


def _boot() -> bytes:
    """Return what this boot of the machine has as its name, and no other."""
    return host_files.read("/proc/sys/kernel/random/boot_id")


def _sees_every_process() -> bool:
    try:
        return os.stat("/proc/self/ns/pid").st_ino == FIRST_PIDS
    except OSError:
        return False


def _is_mounted(name: str) -> bool:
    """Tell whether a container has a folder of that name mounted, or that can't be told."""
    look = Look(_LOOK)
    for processes in look.namespaces().values():
        tables = (look.table(each) for each in processes if each != _INIT and look.goes_on())
        table = next((each for each in tables if each is not None), b"")
        # proc_pid_mountinfo(5): the path within the filesystem, as it is called now.
        mounts = Mounts(table) if name.encode() in table else ()
        if any(name.encode() in mount.root.split(b"/") for mount in mounts):
            return True
    return look.is_hidden or not look.is_whole

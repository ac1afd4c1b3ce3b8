"""The driver folder's path, and a private work folder of root next to it.

A new driver folder is exchanged atomically with the old one, so that a complete one exists at
every moment. Containers with the old one keep it, because they have mounted that folder itself,
whatever its name. It is removed when no container uses it.
"""

import contextlib
import errno
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterator

from gpuhook.base.errors import DriverFolderError
from gpuhook.base.host import files as host_files
from gpuhook.base.host import lock
from gpuhook.base.host.proc import FIRST_PIDS, Mounts
from gpuhook.base.state_directory import boot_id
from gpuhook.monitor.host.namespaces import NamespaceScan

MARKER = ".gpuhook-driver-folder"  # in every complete driver folder
FOLDER_MODE = 0o755
_SUPERSEDED = ".gpuhook-superseded"  # in a replaced one: the boot id at its replacement
_WORK = ".{}.gpuhook"  # the work folder

_PATIENCE = 30.0  # seconds; linking or copying takes less
_MAX_MARKER = 1 << 20
_LOOK = 10.0  # seconds to search the mounts; nothing waits for it
_INIT = "1"  # in no container, and not accessible to every root user
_REMEDIES = {
    errno.EBUSY: "It is a mount point: mount its parent folder instead",
    errno.EINVAL: "Choose a folder on another filesystem, such as ext4, xfs or btrfs",
}


class FolderPath:
    """The path of a driver folder."""

    def __init__(self, folder: str) -> None:
        """UntrustedPathError if another user could redirect the path."""
        host_files.check_way(folder)  # protects: folder-way
        self.path = os.path.realpath(folder)
        parent, name = os.path.split(self.path)
        self._work = os.path.join(parent, _WORK.format(name))

    def check(self) -> None:
        """Raise DriverFolderError if the path exists and isn't ours."""
        try:
            status = os.lstat(self.path)
        except FileNotFoundError:
            return
        if stat.S_ISDIR(status.st_mode) and (self.is_whole() or not os.listdir(self.path)):
            return
        raise DriverFolderError(
            f"{self.path} exists and isn't a driver folder of gpuhook",
            "Choose a path that doesn't exist",
        )

    def exists(self) -> bool:
        """Tell whether the folder or remains of one exist."""
        return self.is_whole() or os.path.lexists(self._work)

    def is_whole(self) -> bool:
        """Tell whether there is a complete driver folder."""
        return _is_whole(self.path)

    def marker(self) -> bytes:
        """Return the content of its marker, b"" if there is none."""
        try:
            return host_files.read(os.path.join(self.path, MARKER), _MAX_MARKER)
        except OSError:
            return b""

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock it against other processes; DriverFolderError if one holds the lock too long."""
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
                    "Wait until it has exited, or kill it if it hangs, and run this again",
                )
            with contextlib.suppress(FileNotFoundError):  # removed by the previous holder
                if os.path.samestat(os.fstat(fd), os.lstat(self._work)):
                    return fd
            os.close(fd)

    def _open(self) -> int:
        """Open the work folder, inaccessible to other users, who could otherwise lock it.

        It is itself locked, and not a file in it as in a ``StateDirectory``, so that running
        programs of earlier versions are excluded, and the empty folder can be removed.
        """
        os.makedirs(os.path.dirname(self._work), exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.mkdir(self._work, 0o700)
        host_files.check_way(self._work)  # protects: work-way
        fd = os.open(self._work, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        os.fchmod(fd, 0o700)
        return fd

    # The rest needs the lock ----------------------------------------------------------------------

    def new_folder(self) -> str:
        """Create a folder for the new content, with a unique name."""
        path = os.path.join(self._work, secrets.token_hex(8))
        os.mkdir(path)
        os.chmod(path, FOLDER_MODE)  # whatever the umask is
        return path

    def put(self, made: str) -> None:
        """Put a complete folder in its place; DriverFolderError if that fails."""
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
        """Remove it from its place."""
        old = os.path.join(self._work, secrets.token_hex(8))
        try:
            os.rename(self.path, old)
            _note_superseded(old)
        except OSError as error:
            raise failure(self.path, error) from None

    def clean(self) -> int:
        """Delete unused older folders and unfinished ones; return the number of those kept."""
        stay = 0
        for name in os.listdir(self._work):
            old = os.path.join(self._work, name)
            if _is_whole(old) and _may_be_used(old):
                stay += 1
            else:
                shutil.rmtree(old)
        return stay

    def forget(self) -> None:
        """Remove the work folder, unless it has older driver folders."""
        with contextlib.suppress(OSError):
            os.rmdir(self._work)


def failure(path: str, error: OSError) -> DriverFolderError:
    """Return the error for a failed system call."""
    remedy = _REMEDIES.get(error.errno or 0, "Run this as root, where that folder can be changed")
    remedy = host_files.remedy(error, remedy)
    return DriverFolderError(f"{path} can't be set up: {error.strerror}", remedy)


def _is_whole(folder: str) -> bool:
    """Tell whether a folder is complete and belongs to root or us, so no other user can change it.

    In a folder such as /tmp another user could create one after ``check_way`` found none.
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
    """Tell whether a container may use an older folder.

    After a reboot none does. Before, only a process that sees all processes of the host can tell,
    which isn't possible in a pod. A folder without a note of its replacement was replaced just
    now by a process that was killed: a container that is starting may use it.
    """
    try:
        boot = host_files.read(os.path.join(old, _SUPERSEDED))
    except OSError:
        _note_superseded(old)
        return True
    if boot.strip() != boot_id().encode():
        return False
    # protects: folder-in-use
    return not _sees_every_process() or _is_mounted(os.path.basename(old))


def _note_superseded(old: str) -> None:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        host_files.replace(os.path.join(old, _SUPERSEDED), boot_id().encode() + b"\n")


def _sees_every_process() -> bool:
    try:
        return os.stat("/proc/self/ns/pid").st_ino == FIRST_PIDS
    except OSError:
        return False


def _is_mounted(name: str) -> bool:
    """Tell whether a container has, or may have, a folder of a name mounted."""
    look = NamespaceScan(_LOOK)
    for processes in look.namespaces().values():
        tables = (look.table(each) for each in processes if each != _INIT and look.goes_on())
        table = next((each for each in tables if each is not None), b"")
        # proc_pid_mountinfo(5): the current path within the filesystem.
        mounts = Mounts(table) if name.encode() in table else ()
        if any(name.encode() in mount.root.split(b"/") for mount in mounts):
            return True
    return look.is_hidden or not look.is_whole

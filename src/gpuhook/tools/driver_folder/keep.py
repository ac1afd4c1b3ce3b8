"""Creation of a driver folder, its comparison with the driver, and its removal.

Files are hard links where the kernel allows them, to save space, and copies elsewhere. Their
permissions are safe for containers: owned by root, without set-user-ID, and not writable by other
users.
"""

import contextlib
import fcntl
import json
import os
import shutil
import stat
from types import ModuleType
from typing import Any

from gpuhook.base.config.model import Config
from gpuhook.base.container.kernel import LABEL
from gpuhook.base.container.rootfs import Rootfs
from gpuhook.base.errors import DriverFolderError
from gpuhook.base.host.files import sync_folder
from gpuhook.core.inventory.model import Inventory
from gpuhook.tools.driver_folder import PART, DriverContent
from gpuhook.tools.driver_folder.place import FOLDER_MODE, MARKER, FolderPath, failure

_FICLONE = 0x40049409  # linux/fs.h
_CHUNK = 1 << 20
_FORBIDDEN = stat.S_ISUID | stat.S_ISGID | stat.S_IWGRP | stat.S_IWOTH
_CAPABILITIES = "security.capability"  # an extended attribute equivalent to set-user-ID
_LIKE = "/usr"  # in the driver root; the folders get its SELinux label

Facts = dict[str, Any]  # a folder's description, as in its marker


def keep(config: Config, names: ModuleType, inventory: Inventory, folder: str) -> bool:
    """Update ``folder`` with the driver files of a vendor's inventory; return whether it changed.

    The device plugin calls this at start-up and whenever the driver may have changed. Without a
    change, it only stats each file. For a vendor without such files (``DriverFolder``)
    nothing is done. The content of ``folder`` is replaced atomically, and containers that have
    it mounted keep the old content. GpuhookError (mostly DriverFolderError) if that fails, or if
    the path is something else; an old folder is kept then.
    """
    driver = PART(names)
    return driver is not None and update(folder, driver.content_of(config, inventory))


def update(folder: str, wanted: DriverContent) -> bool:
    """Update ``folder`` to the wanted content; return whether it changed, GpuhookError if not."""
    place = FolderPath(folder)
    place.check()
    try:
        with place.locked(), Rootfs(wanted.root) as root:
            place.clean()
            facts = _facts(root, wanted)
            if _holds(place, facts):
                return False
            _check_programs_run(os.path.dirname(place.path))
            before = place.path if place.is_whole() else ""  # protects: copies-owner
            made = place.new_folder()
            try:
                _fill(made, root, facts, wanted.folders, before)
                place.put(made)
            except BaseException:
                place.clean()
                raise
            return True
    except OSError as error:
        raise failure(place.path, error) from None


def is_current(folder: str, wanted: DriverContent) -> bool:
    """Tell whether ``folder`` already has the wanted content; change nothing."""
    place = FolderPath(folder)
    place.check()
    with Rootfs(wanted.root) as root:
        return _holds(place, _facts(root, wanted))


def remove(folder: str) -> int:
    """Remove a driver folder; return the number of older ones kept for running containers.

    DriverFolderError if there is none.
    """
    place = FolderPath(folder)
    place.check()
    if not place.exists():
        raise DriverFolderError(f"There is no driver folder {place.path}", "Name another one")
    try:
        with place.locked():
            if place.is_whole():
                place.take_away()
            stay = place.clean()
            place.forget()
            return stay
    except OSError as error:
        raise failure(place.path, error) from None


# Wanted and current content -------------------------------------------------------------------


def _facts(root: Rootfs, wanted: DriverContent) -> Facts:
    """Return the wanted content: each file with its source's path, size and time."""
    files = {}
    for name, path in sorted(wanted.files.items()):
        status = root.stat(path)
        if status is None or not stat.S_ISREG(status.st_mode):
            raise _changed(root, path)
        files[name] = [path, status.st_size, status.st_mtime_ns]
    return {
        "version": wanted.version,
        "root": wanted.root,
        "files": files,
        "links": dict(sorted(wanted.links.items())),
    }


def _changed(root: Rootfs, path: str) -> DriverFolderError:
    return DriverFolderError(
        f"{root.path.rstrip('/')}{path} has changed or is gone since the driver was checked",
        "Run gpuhook refresh, and this again",
    )


def _holds(place: FolderPath, facts: Facts) -> bool:
    """Tell whether the folder has the given facts, and all its files exist."""
    if not place.is_whole() or place.marker() != _text(facts):
        return False
    found = dict(_tree(place.path))
    for name, (_, size, time) in facts["files"].items():
        status = found.pop(name, None)
        if status is None or not stat.S_ISREG(status.st_mode):
            return False
        if (status.st_size, status.st_mtime_ns) != (size, time):
            return False
    for name, text in facts["links"].items():
        if found.pop(name, None) is None or _read_link(f"{place.path}/{name}") != text:
            return False
    return set(found) == {MARKER}


def _tree(folder: str) -> list[tuple[str, os.stat_result]]:
    """Return all files in a folder except folders, by their relative paths."""
    found = []
    for parent, folders, names in os.walk(folder):
        for name in (*names, *(each for each in folders if os.path.islink(f"{parent}/{each}"))):
            path = os.path.join(parent, name)
            found.append((os.path.relpath(path, folder), os.lstat(path)))
    return found


def _read_link(path: str) -> str | None:
    try:
        return os.readlink(path)
    except OSError:
        return None


def _text(facts: Facts) -> bytes:
    return json.dumps(facts, indent=1).encode() + b"\n"


# Creation --------------------------------------------------------------------------------------


def _check_programs_run(folder: str) -> None:
    """Raise DriverFolderError on a noexec filesystem, whose flags containers' mounts inherit."""
    if os.statvfs(folder).f_flag & os.ST_NOEXEC:
        raise DriverFolderError(
            f"{folder} is on a filesystem mounted with noexec, which prevents running programs",
            "Choose a folder on another filesystem",
        )


def _fill(made: str, root: Rootfs, facts: Facts, usual: tuple[str, ...], before: str) -> None:
    """Fill an empty folder; the marker comes last, when all files are complete and on disk.

    ``before`` is the folder that it replaces, "" if that isn't ours.
    """
    names = [*facts["files"], *facts["links"]]
    folders = {*usual, *(os.path.dirname(name) for name in names)}
    label = _label_below(root, _LIKE)
    _set_label(made, label)
    for name in sorted(folders):
        path = os.path.join(made, name)
        os.makedirs(path)
        os.chmod(path, FOLDER_MODE)  # whatever the umask is
        _set_label(path, label)
    for name, (path, size, time) in facts["files"].items():
        fd = root.open_file(path)
        if fd is None:
            raise _changed(root, path)
        try:
            status = os.fstat(fd)
            if (status.st_size, status.st_mtime_ns) != (size, time):
                raise _changed(root, path)
            _bring(fd, status, f"{made}/{name}", before and f"{before}/{name}")
        finally:
            os.close(fd)
    for name, text in facts["links"].items():
        os.symlink(text, f"{made}/{name}")
    for name in sorted(folders):
        sync_folder(f"{made}/{name}")
    _write(f"{made}/{MARKER}", _text(facts))
    sync_folder(made)


def _bring(fd: int, status: os.stat_result, target: str, before: str) -> None:
    """Create ``target`` as a hard link to the open file, or a copy, reusing that in ``before``."""
    if _is_for_containers(fd, status) and _link(fd, target):  # protects: file-rights
        return
    if before and _link_copy(fd, status, target, before):
        return
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(target, flags, 0o600), "wb") as copy, open(os.dup(fd), "rb") as source:
        try:
            fcntl.ioctl(copy, _FICLONE, fd)
        except OSError:
            shutil.copyfileobj(source, copy, _CHUNK)
        copy.flush()
        os.fchmod(copy.fileno(), stat.S_IMODE(status.st_mode) & ~_FORBIDDEN)
        _set_label(copy.fileno(), _label_of(fd))
        os.utime(copy.fileno(), ns=(status.st_atime_ns, status.st_mtime_ns))
        os.fsync(copy.fileno())


def _is_for_containers(fd: int, status: os.stat_result) -> bool:
    """Tell whether a file is safe to link, because a hard link has its owner and permissions."""
    if (status.st_uid, status.st_gid) != (0, 0) or status.st_mode & _FORBIDDEN:
        return False
    return _attribute(fd, _CAPABILITIES) is None


def _link(fd: int, target: str) -> bool:
    """Create a hard link to an open file; False if impossible, as on another filesystem."""
    parent = os.open(os.path.dirname(target), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # With a folder's descriptor Python calls linkat(2), which follows the link in /proc.
        os.link(f"/proc/self/fd/{fd}", os.path.basename(target), dst_dir_fd=parent)
    except OSError:
        return False
    finally:
        os.close(parent)
    return True


def _link_copy(fd: int, status: os.stat_result, target: str, before: str) -> bool:
    """Link ``target`` to an earlier equal copy; False if there is none.

    A driver container installs the same files again at each start, and an older folder may have
    to stay until a reboot.
    """
    try:
        copy = os.open(before, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        found = os.fstat(copy)
        mode = stat.S_IFREG | (stat.S_IMODE(status.st_mode) & ~_FORBIDDEN)
        if (found.st_mode, found.st_size) != (mode, status.st_size):
            return False
        if _label_of(copy) != _label_of(fd) or not _is_equal(copy, fd) or not _link(copy, target):
            return False
        os.utime(copy, ns=(status.st_atime_ns, status.st_mtime_ns))
        return True
    finally:
        os.close(copy)


def _is_equal(one: int, other: int) -> bool:
    """Tell whether two open files of the same size have the same content."""
    at = 0
    while (data := os.pread(one, _CHUNK, at)) == os.pread(other, _CHUNK, at):
        if not data:
            return True
        at += len(data)
    return False


def _write(path: str, data: bytes) -> None:
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fchmod(file.fileno(), 0o444)
        os.fsync(file.fileno())


# SELinux ---------------------------------------------------------------------------------------


def _label_below(root: Rootfs, path: str) -> bytes | None:
    with contextlib.suppress(OSError):
        fd = root.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            return _label_of(fd)
        finally:
            os.close(fd)
    return None


def _label_of(fd: int) -> bytes | None:
    return _attribute(fd, LABEL)


def _set_label(file: int | str, label: bytes | None) -> None:
    """Set a file's SELinux label to the driver's, because new files get their folder's label."""
    if label is not None:
        with contextlib.suppress(OSError):  # a filesystem without labels
            os.setxattr(file, LABEL, label)


def _attribute(fd: int, name: str) -> bytes | None:
    try:
        return os.getxattr(fd, name)
    except OSError:
        return None

"""Files of this host that another user may have put there: read and written by root.

A pipe in place of a file would block forever, a link would lead root elsewhere, and a file may
have any size. So commands read files only here: without blocking, only regular files, and only up
to a limit.

Imports errno, os, stat, errors and fileio, because container starts may read CDI specs.
"""

import errno
import os
import stat

from gpuhook.base import fileio
from gpuhook.base.errors import UntrustedPathError

MAX_BYTES = 16 << 20  # bytes; far more than any configuration or record of an engine
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC  # protects: no-waiting-open
# protects: no-link-followed
_NEW = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_NOFOLLOW | os.O_CLOEXEC
_ROOT = 0
_NOBODY = 65534  # the kernel's stand-in for owners that aren't mapped into a user namespace
_FIRST_USER_NAMESPACE = 0xEFFFFFFD  # PROC_USER_INIT_INO of linux/proc_ns.h
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h
_LINKS = 40  # on the way to a file, as in the kernel (path_resolution(7))
_NEW_MODE = 0o644
_PRIVATE = 0o600
_ACL = "system.posix_acl_access"  # acl(5); with one, the group bits are the mask of all entries


def read(path: str, most: int = MAX_BYTES) -> bytes:
    """Return a regular file's content; OSError for anything else, and for more than ``most`` bytes.

    Never blocks: neither for a pipe's other end, nor for a file lease.
    """
    return _whole(path, read_start(path, most + 1), most)


def read_start(path: str, most: int = MAX_BYTES) -> bytes:
    """Return at most the first ``most`` bytes of a regular file; OSError for anything else."""
    fd = _open_regular(path, _READ)
    try:
        return fileio.read_start(fd, most)
    finally:
        os.close(fd)


def read_roots(path: str, most: int = MAX_BYTES) -> bytes:
    """Return the content of a file that root is to execute, as ``read`` does.

    UntrustedPathError if a non-root user can have written it. The opened file itself is checked,
    because in a folder such as /tmp another file may be put in its place.
    """
    check_way(path)
    fd = _open_regular(path, _READ)
    try:
        _check_writers(path, os.fstat(fd))
        return _whole(path, fileio.read_start(fd, most + 1), most)
    finally:
        os.close(fd)


def _whole(path: str, data: bytes, most: int) -> bytes:
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it is larger than {most} bytes", path)
    return data


def create_private(path: str) -> int:
    """Return a descriptor of an empty file that only this user may read and write.

    A regular file of this user is truncated. Anything else at the path is an OSError, above all a
    link: in a folder such as /tmp, any user may put one there.
    """
    try:
        return os.open(path, _NEW | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        fd = _open_regular(path, _NEW)
    try:
        status = os.fstat(fd)
        if status.st_uid != os.geteuid() or status.st_nlink != 1:
            raise OSError(errno.EEXIST, "another user's file is there", path)
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, 0)
    except OSError:
        os.close(fd)
        raise
    return fd


def _open_regular(path: str, flags: int) -> int:
    try:
        fd = os.open(path, flags)
    except ValueError as error:  # a NUL character
        raise OSError(errno.EINVAL, str(error), path) from None
    except PermissionError as error:
        raise _denied(error, path) from None
    if stat.S_ISREG(os.fstat(fd).st_mode):  # protects: regular-read
        return fd
    os.close(fd)
    raise OSError(errno.EINVAL, "it isn't a regular file", path)


def status_of(path: str) -> os.stat_result:
    """Return the status of a path's target; OSError with the messages of ``read``."""
    try:
        return os.stat(path)
    except PermissionError as error:
        raise _denied(error, path) from None


def _denied(error: PermissionError, path: str) -> OSError:
    """Return an error that says why root may not follow a link, if it is one."""
    if os.geteuid() != _ROOT or not os.path.islink(path):
        return error
    # fs.protected_symlinks, proc_sys_fs(5), which systemd sets.
    why = "it is a link in a folder where other users may write, and doesn't belong to root"
    return OSError(error.errno, why, path)


def check_way(path: str) -> None:
    """Raise UntrustedPathError if a non-root user could redirect root on this path.

    That is so if a folder or a link on it belongs to another user, or if a folder is
    world-writable without the sticky bit. A missing file is as safe as its folder; a missing
    folder must not be in one where other users may create it. Does nothing if we aren't root:
    then the kernel protects us.
    """
    if os.geteuid() != _ROOT:  # protects: owners-identity
        return
    links, way, target = 0, "/", ""
    pending = _names(path if path.startswith("/") else os.path.join(os.getcwd(), path))
    above = os.lstat(way)
    _check_folder(way, above, path)
    while pending:
        name = pending.pop()
        found = os.path.dirname(way) if name == ".." else os.path.join(way, name)
        # Each is checked once: it may be removed meanwhile, and a user's put in its place.
        try:
            status = os.lstat(found)
            is_link = stat.S_ISLNK(status.st_mode)
            if not is_link:
                _check_folder(found, status, path)
            elif links >= _LINKS or not is_roots(status.st_uid):
                raise _untrusted(path, f"the link {found}, which user {status.st_uid} made")
            else:
                target = os.readlink(found)
        except OSError:
            if pending and above.st_mode & stat.S_IWOTH:
                raise _untrusted(path, f"{found}, which any user could create") from None
            return
        if not is_link:
            way, above = found, status
            continue
        links += 1
        pending += _names(target)
        if target.startswith("/"):
            way, above = "/", os.lstat("/")


def check_writers(path: str) -> None:
    """Raise UntrustedPathError if a non-root user can have written a file.

    For files that root is to execute and that ``read_roots`` doesn't read. Does nothing if we
    aren't root, or if the file doesn't exist.
    """
    check_way(path)
    if os.path.exists(path):
        _check_writers(path, os.stat(path))


def check_owner(path: str) -> None:
    """Raise UntrustedPathError if a file that root replaces would belong to another user.

    The owner is kept, because an administrator has chosen it. But in a world-writable folder, as
    /tmp, any user may have created the file in order to write to it later.
    """
    if os.geteuid() != _ROOT:
        return
    try:
        owner = os.lstat(path).st_uid
        everybodys = os.stat(os.path.dirname(path) or ".").st_mode & stat.S_IWOTH
    except OSError:
        return
    if everybodys and not is_roots(owner):  # protects: kept-owner
        raise UntrustedPathError(
            f"{path} belongs to user {owner}, who would control its content, and any user may "
            "create files there",
            "Remove it, or name a file in a folder that only root can change",
        )


def _check_writers(path: str, status: os.stat_result) -> None:
    if os.geteuid() != _ROOT:
        return
    others = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if others or not is_roots(status.st_uid):  # protects: read-writers
        raise UntrustedPathError(
            f"{path} may be written by non-root users, who would control what root does",
            f"Run chown root:root {path} and chmod go-w {path}",
        )


def is_roots(uid: int) -> bool:
    """Tell whether an owner is root, as far as that is visible.

    If a user is root in an own user namespace, as below a rootless engine, the host's root isn't
    mapped there. Only that user's own rights are at stake then.
    """
    if uid != _NOBODY or os.lstat("/").st_uid != _NOBODY:
        return uid == _ROOT
    try:
        return os.stat("/proc/self/ns/user").st_ino != _FIRST_USER_NAMESPACE
    except OSError:
        return False


def _names(path: str) -> list[str]:
    """Return the components of a path, the last one first."""
    return [name for name in reversed(path.split("/")) if name not in ("", ".")]


def _check_folder(folder: str, status: os.stat_result, path: str) -> None:
    if not stat.S_ISDIR(status.st_mode):
        return
    if not is_roots(status.st_uid):
        raise _untrusted(path, f"the folder {folder}, which belongs to user {status.st_uid}")
    if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
        raise _untrusted(path, f"the folder {folder}, which every user may change")


def _untrusted(path: str, what: str) -> UntrustedPathError:
    return UntrustedPathError(
        f"{path} is reached through {what} and could lead root elsewhere",
        "Run this as that user, or name a path that only root can change",
    )


def copy_mode(*sources: str) -> int | None:
    """Return the mode for a file that copies others; None if all of those are world-readable.

    The returned mode is for the owner only, because a copy's group and access control list may
    differ. Missing sources don't count.
    """
    for path in sources:
        try:
            if not os.stat(path).st_mode & stat.S_IROTH:  # protects: repeated-mode
                return _PRIVATE
        except OSError:
            continue
    return None


def replace(path: str, data: bytes, mode: int | None = None) -> None:
    """Write ``data`` to ``path`` durably, with a temporary file in the same folder and rename.

    Owner, mode and access control list of an existing file are kept; a given ``mode`` replaces
    mode and list. A symbolic link stays and its target is replaced. Raises OSError, and
    UntrustedPathError if another user's link could lead root elsewhere, or another user's file is
    there (``check_owner``); then nothing has changed.
    """
    check_way(path)
    path = os.path.realpath(path)
    folder = os.path.dirname(path)
    # Two processes may do this at once, so temporary names are unique.
    temporary = f"{folder}/.{os.path.basename(path)}.{os.urandom(8).hex()}"

    def finish(fd: int) -> None:
        _copy_identity(path, fd, mode)
        os.fsync(fd)

    fileio.replace(path, data, temporary, finish=finish)
    sync_folder(folder)


def remove(path: str) -> None:
    """Remove a file, if it exists, and the temporary files of killed writers (``replace``).

    OSError on failure. A running writer's temporary file is removed as well.
    """
    folder, name = os.path.split(path)
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    for found in os.listdir(folder) if os.path.isdir(folder) else ():
        if found.startswith(f".{name}."):
            fileio.remove(f"{folder}/{found}")


def exchange(one: str, other: str) -> None:
    """Exchange two paths of one filesystem atomically; OSError if that isn't possible.

    Source: renameat2(2), RENAME_EXCHANGE.
    """
    import ctypes  # noqa: PLC0415 - slow, and no container start does this

    libc = ctypes.CDLL(None, use_errno=True)
    words = _AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE
    if libc.renameat2(*words):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), other)


def remedy(error: OSError, otherwise: str) -> str:
    """Return the remedy if a file can't be written; ``otherwise`` unless the disk is full."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return "Free space on its filesystem, and run this again" if full else otherwise


def sync_folder(folder: str) -> None:
    """Make a folder's names survive a power loss."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _copy_identity(path: str, fd: int, mode: int | None) -> None:
    check_owner(path)
    try:
        old = os.stat(path)
    except FileNotFoundError:
        os.fchmod(fd, _NEW_MODE if mode is None else mode)
        return
    # The owner first: changing it clears the set-id bits.
    os.fchown(fd, old.st_uid, old.st_gid)
    if mode is None:
        mode = stat.S_IMODE(old.st_mode)
        _copy_list(path, fd)  # protects: access-list
    os.fchmod(fd, mode)


def _copy_list(path: str, fd: int) -> None:
    """Copy another file's access control list, or remove the list if that has none."""
    none = errno.ENODATA, errno.ENOTSUP
    try:
        os.setxattr(fd, _ACL, os.getxattr(path, _ACL))
    except OSError as error:
        if error.errno not in none:
            raise
        try:
            os.removexattr(fd, _ACL)  # the folder may have a default list
        except OSError as other:
            if other.errno not in none:
                raise

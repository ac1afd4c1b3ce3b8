"""Files of this machine that another user may have put there: read, and written, by root.

A pipe in a file's place would be waited for without end, a link would lead root elsewhere,
and a file may be of any size. So what the commands read they read here: without waiting,
regular files alone, and not without bound.

Imports errno, os, stat, errors and fileio, because a container's start may read CDI documents.
"""

import errno
import os
import stat

from gpuhook.ground import fileio
from gpuhook.ground.errors import UntrustedPathError

LIMIT = 16 << 20  # bytes; no configuration or record of an engine comes near
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC  # protects: no-waiting-open
# protects: no-link-followed
_NEW = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_NOFOLLOW | os.O_CLOEXEC
_ROOT = 0
_NOBODY = 65534  # how the kernel shows owners that a user namespace has no number for
_FIRST_USER_NAMESPACE = 0xEFFFFFFD  # PROC_USER_INIT_INO of linux/proc_ns.h
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h
_LINKS = 40  # on the way to a file, as in the kernel (path_resolution(7))
_NEW_MODE = 0o644
_PRIVATE = 0o600
_ACL = "system.posix_acl_access"  # acl(5); beside one, a group's bits are everybody's most


def read(path: str, most: int = LIMIT) -> bytes:
    """Return a regular file's content; OSError for anything else, and for more than ``most`` bytes.

    Never waits: not for a pipe's other end, nor for who holds a lease.
    """
    return _whole(path, read_start(path, most + 1), most)


def read_start(path: str, most: int = LIMIT) -> bytes:
    """Return at most the first ``most`` bytes of a regular file; OSError for anything else."""
    fd = _open_regular(path, _READ)
    try:
        return fileio.read_start(fd, most)
    finally:
        os.close(fd)


def read_roots(path: str, most: int = LIMIT) -> bytes:
    """Return the content of a file that root is to carry out, as ``read`` does.

    UntrustedPathError where another user than root can have written it: the very file that is
    read is looked at, because in a folder such as /tmp another may be put in its place.
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
    """Return a descriptor of a file that is empty, and for this user alone to read and write.

    A regular file of this user is emptied. Anything else that stands there is refused with an
    OSError, a link above all: in a folder such as /tmp everybody may put one.
    """
    try:
        return os.open(path, _NEW | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        fd = _open_regular(path, _NEW)
    try:
        status = os.fstat(fd)
        if status.st_uid != os.geteuid() or status.st_nlink != 1:
            raise OSError(errno.EEXIST, "a file of somebody else is there", path)
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
    """Return the status of what a path leads to; OSError in the words of ``read``."""
    try:
        return os.stat(path)
    except PermissionError as error:
        raise _denied(error, path) from None


def _denied(error: PermissionError, path: str) -> OSError:
    """Return an error that says why root may not follow a link, where it is one."""
    if os.geteuid() != _ROOT or not os.path.islink(path):
        return error
    # fs.protected_symlinks, proc_sys_fs(5), which systemd sets.
    why = "it is a link in a folder where others may write, and not root's"
    return OSError(error.errno, why, path)


def check_way(path: str) -> None:
    """Raise UntrustedPathError if another user than root could lead root elsewhere on this path.

    That is where a folder or a link on it belongs to another user, or a folder is open to
    everybody without the sticky bit. What doesn't exist yet is as safe as the folder that it
    will be in; a folder that doesn't must not be in one where others may make it. Says nothing
    where we aren't root: then the kernel keeps us from harm.
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
        # Each is looked at once: it may be removed meanwhile, and one of a user's put back.
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
                raise _untrusted(path, f"{found}, which anybody could make") from None
            return
        if not is_link:
            way, above = found, status
            continue
        links += 1
        pending += _names(target)
        if target.startswith("/"):
            way, above = "/", os.lstat("/")


def check_writers(path: str) -> None:
    """Raise UntrustedPathError where another user than root can have written a file.

    For what root is to carry out, and isn't read by ``read_roots``. Says nothing where we aren't
    root, and of what isn't there.
    """
    check_way(path)
    if os.path.exists(path):
        _check_writers(path, os.stat(path))


def check_owner(path: str) -> None:
    """Raise UntrustedPathError if a file that root replaces would be another user's afterwards.

    An owner is kept, as an administrator has chosen it. But where everybody may make files, as in
    /tmp, anybody may have made that one, to write to it later.
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
            f"{path} belongs to user {owner}, who would decide what is in it, and anybody may "
            "make files there",
            "Remove it, or name a file in a folder that root alone can change",
        )


def _check_writers(path: str, status: os.stat_result) -> None:
    if os.geteuid() != _ROOT:
        return
    others = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if others or not is_roots(status.st_uid):  # protects: read-writers
        raise UntrustedPathError(
            f"{path} may be written by others than root, who would decide what root does",
            f"Run chown root:root {path} and chmod go-w {path}",
        )


def is_roots(uid: int) -> bool:
    """Tell whether an owner is root, as far as that can be seen.

    Where a user is root in a user namespace of his own, as below a rootless engine, the host's
    root has no number. Nobody else's power than that user's is at stake there.
    """
    if uid != _NOBODY or os.lstat("/").st_uid != _NOBODY:
        return uid == _ROOT
    try:
        return os.stat("/proc/self/ns/user").st_ino != _FIRST_USER_NAMESPACE
    except OSError:
        return False


def _names(path: str) -> list[str]:
    """Return a path's names, the last one first."""
    return [name for name in reversed(path.split("/")) if name not in ("", ".")]


def _check_folder(folder: str, status: os.stat_result, path: str) -> None:
    if not stat.S_ISDIR(status.st_mode):
        return
    if not is_roots(status.st_uid):
        raise _untrusted(path, f"the folder {folder}, which belongs to user {status.st_uid}")
    if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
        raise _untrusted(path, f"the folder {folder}, which everybody may change")


def _untrusted(path: str, what: str) -> UntrustedPathError:
    return UntrustedPathError(
        f"{path} is reached through {what} and could lead root elsewhere",
        "Run this as that user, or name a path that root alone can change",
    )


def copy_mode(*sources: str) -> int | None:
    """Return the mode for a file that repeats others; None where everybody may read all of those.

    Then it is for its owner alone: whose group a file has may differ, and so may rights beside
    its mode. Sources that aren't there count for nothing.
    """
    for path in sources:
        try:
            if not os.stat(path).st_mode & stat.S_IROTH:  # protects: repeated-mode
                return _PRIVATE
        except OSError:
            continue
    return None


def replace(path: str, data: bytes, mode: int | None = None) -> None:
    """Write ``data`` to ``path`` on disk, by a temporary file in the same folder and rename.

    Owner, mode and access control list of an existing file are kept; where ``mode`` is given,
    the file has that one instead of mode and list. A symbolic link stays one and its target is
    replaced. Raises OSError, and UntrustedPathError where another user's link could lead root
    elsewhere, or his file is there (``check_owner``); then nothing has changed.
    """
    check_way(path)
    path = os.path.realpath(path)
    folder = os.path.dirname(path)
    # Two may do this at once, so nobody's temporary file has the name of another's.
    temporary = f"{folder}/.{os.path.basename(path)}.{os.urandom(8).hex()}"

    def finish(fd: int) -> None:
        _copy_identity(path, fd, mode)
        os.fsync(fd)

    fileio.replace(path, data, temporary, finish=finish)
    sync_folder(folder)


def exchange(one: str, other: str) -> None:
    """Have two paths of one filesystem change places in one step; OSError where that can't be.

    Source: renameat2(2), RENAME_EXCHANGE.
    """
    import ctypes  # noqa: PLC0415 - slow, and no container's start does this

    libc = ctypes.CDLL(None, use_errno=True)
    words = _AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE
    if libc.renameat2(*words):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), other)


def remedy(error: OSError, otherwise: str) -> str:
    """Return what helps where a file couldn't be written; ``otherwise`` if space doesn't."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return "Make room on its filesystem, and run this again" if full else otherwise


def sync_folder(folder: str) -> None:
    """Make the names in a folder last through a power cut."""
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
    # The owner first: a change of owner takes the set-id bits away.
    os.fchown(fd, old.st_uid, old.st_gid)
    if mode is None:
        mode = stat.S_IMODE(old.st_mode)
        _copy_list(path, fd)  # protects: access-list
    os.fchmod(fd, mode)


def _copy_list(path: str, fd: int) -> None:
    """Give a file another's access control list, or none where that has none."""
    none = errno.ENODATA, errno.ENOTSUP
    try:
        os.setxattr(fd, _ACL, os.getxattr(path, _ACL))
    except OSError as error:
        if error.errno not in none:
            raise
        try:
            os.removexattr(fd, _ACL)  # the folder may have given it one
        except OSError as other:
            if other.errno not in none:
                raise

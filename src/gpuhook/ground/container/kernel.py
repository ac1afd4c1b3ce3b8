"""System calls that Python doesn't have, each raising OSError with the path it was about.

One function per call, numbers and constants named as in the kernel's headers. This module
and ``rootfs`` are the only ones that change anything in a container.
"""

import errno
import os
import sys
import time

from gpuhook.ground.container import clib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Final

# include/uapi/asm-generic/unistd.h: calls added since Linux 5.0 have one number everywhere.
_OPEN_TREE: "Final" = 428
_MOVE_MOUNT: "Final" = 429
_FSOPEN: "Final" = 430
_FSCONFIG: "Final" = 431
_FSMOUNT: "Final" = 432
_OPENAT2: "Final" = 437
_MOUNT_SETATTR: "Final" = 442
_STATMOUNT: "Final" = 457

# include/uapi/linux/fcntl.h
AT_FDCWD: "Final" = -100
AT_EMPTY_PATH: "Final" = 0x1000
_AT_STATX_DONT_SYNC: "Final" = 0x4000

# include/uapi/linux/openat2.h
RESOLVE_NO_XDEV: "Final" = 0x01
RESOLVE_NO_MAGICLINKS: "Final" = 0x02
RESOLVE_NO_SYMLINKS: "Final" = 0x04
RESOLVE_IN_ROOT: "Final" = 0x10

# include/uapi/linux/stat.h: struct statx begins with the mask of what was filled in
_STATX_INO: "Final" = 0x100
_STATX_BTIME: "Final" = 0x800
_STATX_MNT_ID: "Final" = 0x1000
_STATX_MNT_ID_UNIQUE: "Final" = 0x4000
_STX_INO: "Final" = 0x20
_STX_BTIME: "Final" = 0x50  # seconds in 64 bits, nanoseconds in 32
_STX_DEVICE: "Final" = 0x88  # major and minor of what holds it
_STX_MNT_ID: "Final" = 0x90

# include/uapi/linux/mount.h
_STATMOUNT_MNT_BASIC: "Final" = 2
_STATMOUNT_SIZE: "Final" = 512
OPEN_TREE_CLONE: "Final" = 1
OPEN_TREE_CLOEXEC: "Final" = os.O_CLOEXEC
MOVE_MOUNT_F_EMPTY_PATH: "Final" = 0x04
MOVE_MOUNT_T_EMPTY_PATH: "Final" = 0x40
MOUNT_ATTR_RDONLY: "Final" = 0x01
MOUNT_ATTR_NOSUID: "Final" = 0x02
MOUNT_ATTR_NODEV: "Final" = 0x04
MOUNT_ATTR_NOEXEC: "Final" = 0x08
MS_PRIVATE: "Final" = 1 << 18
MNT_DETACH: "Final" = 2
FSOPEN_CLOEXEC: "Final" = 1
FSMOUNT_CLOEXEC: "Final" = 1
FSCONFIG_SET_STRING: "Final" = 1
FSCONFIG_CMD_CREATE: "Final" = 6

# include/uapi/linux/sched.h
CLONE_NEWNS: "Final" = 0x00020000

# include/uapi/asm-generic/resource.h
RLIMIT_CPU: "Final" = 0
RLIMIT_FSIZE: "Final" = 1
RLIMIT_DATA: "Final" = 2
RLIMIT_AS: "Final" = 9
RLIMIT_SIGPENDING: "Final" = 11
_RLIM_INFINITY: "Final" = (1 << 64) - 1

# include/uapi/linux/xattr.h: XATTR_NAME_SELINUX
LABEL: "Final" = "security.selinux"

# Flags with which a file is made: never over an existing one, never through a link.
CREATE_FLAGS: "Final" = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

_SIGKILL: "Final" = 9
_ends: "dict[int, Any]" = {}  # the timer of this process, by its number

_PAUSE = 0.0005  # seconds between two looks at a child

_libc = clib.Library()
_libc.syscall.restype = clib.c_long
_statx = (clib.c_long * 64)()  # where a long has four bytes, too, it holds a struct statx

# How often a look-up is tried again that a rename elsewhere disturbed, openat2(2), EAGAIN.
_LOOKUP_ATTEMPTS = 1000  # protects: disturbed-lookup

_HINTS = {
    errno.ENOSYS: "this kernel is older than Linux 5.12, which gpuhook needs",
    errno.EPERM: "the process lacks CAP_SYS_ADMIN or a security module forbids it",
}


def syscall(number: int, *args: object, path: str = "") -> int:
    """Make a system call by its number; bytes and buffers are passed as pointers.

    An int must fit into 32 bits: it is passed as C's int, which libffi widens for a register.
    At most five arguments, so that none is left without a register. Raises OSError with
    errno, its text (and for ENOSYS and EPERM a hint) and ``path``. Source: syscall(2).
    """
    result: int = _libc.syscall(number, *args)
    if result < 0:
        raise _os_error(path)
    return result


def _os_error(path: str) -> OSError:
    number = clib.get_errno()
    text = os.strerror(number)
    if number in _HINTS:
        text = f"{text} ({_HINTS[number]})"
    return OSError(number, text, path)


def _structure(*fields: int) -> bytes:
    """Return a structure of 64-bit numbers, for calls that read it and write nothing to it."""
    return b"".join([field.to_bytes(8, sys.byteorder) for field in fields])


def openat2(dir_fd: int, path: str, flags: int, resolve: int, mode: int = 0) -> int:
    """Open a path, its resolution restricted by RESOLVE_* flags; always close-on-exec.

    Tried again while renames elsewhere make the kernel unsure that ``..`` stays inside.
    Source: openat2(2).
    """
    # protects: confined
    how = _structure(flags | os.O_CLOEXEC, mode, resolve)  # struct open_how
    name = os.fsencode(path)
    for attempt in range(_LOOKUP_ATTEMPTS):
        try:
            return syscall(_OPENAT2, dir_fd, name, how, len(how), path=path)
        except BlockingIOError:
            if attempt == _LOOKUP_ATTEMPTS - 1:
                raise
    raise AssertionError


def clone_tree(fd: int, path: str) -> int:
    """Clone what an O_PATH descriptor points at into a detached mount, open_tree(2).

    Returns the detached mount's descriptor. ``path`` is for the error text alone. Needs
    CAP_SYS_ADMIN and a source in the caller's own mount namespace.
    """
    flags = OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_EMPTY_PATH
    return syscall(_OPEN_TREE, fd, b"", flags, path=path)


def mount_id(fd: int) -> int:
    """Return the id of the mount that a descriptor's file was reached through, statx(2).

    It is the one in /proc/PID/mountinfo. Needs Linux 5.8.
    """
    return _stated(fd, _STATX_MNT_ID, _STX_MNT_ID)


def identity(fd: int) -> tuple[int, int]:
    """Return the filesystem and the inode of a descriptor's file, statx(2).

    As the kernel knows them: who serves the filesystem isn't asked.
    """
    inode = _stated(fd, _STATX_INO, _STX_INO)
    told = memoryview(_statx).cast("B")
    return int.from_bytes(told[_STX_DEVICE : _STX_DEVICE + 8], sys.byteorder), inode


def unique_mount_id(fd: int) -> int | None:
    """Return the id of a descriptor's mount that no other one gets until a reboot, statx(2).

    It is in no mount table. None before Linux 6.8.
    """
    try:
        return _stated(fd, _STATX_MNT_ID_UNIQUE, _STX_MNT_ID)
    except OSError as error:
        if error.errno == errno.ENOSYS:
            return None
        raise


def is_mounted(unique: int) -> bool:
    """Tell whether a mount is in this namespace, by its ``unique_mount_id``; statmount(2)."""
    # struct mnt_id_req: its size in 32 bits, and as many without a meaning
    request = (32).to_bytes(4, sys.byteorder) + bytes(4)
    request += _structure(unique, _STATMOUNT_MNT_BASIC, 0)
    answer = (clib.c_long * _STATMOUNT_SIZE)()
    try:
        syscall(_STATMOUNT, request, answer, _STATMOUNT_SIZE, 0)
    except FileNotFoundError:
        return False
    return True


def born(fd: int) -> int | None:
    """Return when a descriptor's file was made, in ns since 1970, statx(2).

    None where that isn't kept; some filesystems say 0 then.
    """
    try:
        seconds = _stated(fd, _STATX_BTIME, _STX_BTIME)
    except OSError as error:
        if error.errno == errno.ENOSYS:
            return None
        raise
    told = memoryview(_statx).cast("B")
    part = int.from_bytes(told[_STX_BTIME + 8 : _STX_BTIME + 12], sys.byteorder)
    return seconds * 10**9 + part or None


def _stated(fd: int, mask: int, place: int) -> int:
    """Return a field of 64 bits of struct statx; OSError where the kernel doesn't fill it in."""
    if _libc.statx(fd, b"", AT_EMPTY_PATH | _AT_STATX_DONT_SYNC, mask, _statx) != 0:
        raise _os_error("")
    told = memoryview(_statx).cast("B")
    if not int.from_bytes(told[:4], sys.byteorder) & mask:
        raise OSError(errno.ENOSYS, f"{os.strerror(errno.ENOSYS)} ({_HINTS[errno.ENOSYS]})")
    return int.from_bytes(told[place : place + 8], sys.byteorder)


def set_mount_attributes(fd: int, attributes: int, path: str, cleared: int = 0) -> None:
    """Add and clear MOUNT_ATTR_* flags of a mount and make it private, mount_setattr(2)."""
    attr = _structure(attributes, cleared, MS_PRIVATE, 0)  # struct mount_attr
    syscall(_MOUNT_SETATTR, fd, b"", AT_EMPTY_PATH, attr, len(attr), path=path)


def set_read_only(fd: int, path: str, *, yes: bool) -> None:
    """Make an attached mount, whose root the descriptor is, read-only or not; mount_setattr(2)."""
    attributes = (MOUNT_ATTR_RDONLY, 0) if yes else (0, MOUNT_ATTR_RDONLY)
    attr = _structure(*attributes, 0, 0)  # struct mount_attr; the propagation stays
    syscall(_MOUNT_SETATTR, fd, b"", AT_EMPTY_PATH, attr, len(attr), path=path)


def attach_mount(mount_fd: int, target_fd: int, path: str) -> None:
    """Attach a detached mount on the file or folder of an O_PATH descriptor, move_mount(2)."""
    flags = MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH
    syscall(_MOVE_MOUNT, mount_fd, b"", target_fd, b"", flags, path=path)


def new_tmpfs(options: dict[str, str], attributes: int) -> int:
    """Make a detached tmpfs with options such as {"mode": "0555"}; return its descriptor."""
    context = syscall(_FSOPEN, b"tmpfs", FSOPEN_CLOEXEC, path="tmpfs")
    try:
        for key, value in options.items():
            arguments = (context, FSCONFIG_SET_STRING, key.encode(), value.encode(), 0)
            syscall(_FSCONFIG, *arguments, path="tmpfs")
        syscall(_FSCONFIG, context, FSCONFIG_CMD_CREATE, None, None, 0, path="tmpfs")
        return syscall(_FSMOUNT, context, FSMOUNT_CLOEXEC, attributes, path="tmpfs")
    finally:
        os.close(context)


def create_file(parent: int, name: str, mode: int) -> int:
    """Make a new file in a folder and return a descriptor to write it, openat(2)."""
    return os.open(name, CREATE_FLAGS, mode, dir_fd=parent)


def create_folder(parent: int, name: str) -> None:
    """Make a new folder in a folder, mode 0755, mkdirat(2)."""
    os.mkdir(name, 0o755, dir_fd=parent)


def create_link(parent: int, name: str, target: str) -> None:
    """Make a new symbolic link in a folder, symlinkat(2)."""
    os.symlink(target, name, dir_fd=parent)


def write(fd: int, data: "bytes | memoryview") -> int:
    """Write what the kernel takes of the data and return how many bytes those were."""
    return os.write(fd, data)


def set_mode(fd: int, mode: int) -> None:
    """Give a file its permission bits, fchmod(2)."""
    os.fchmod(fd, mode)


def set_label(fd: int, label: bytes) -> None:
    """Give a file an SELinux label, fsetxattr(2)."""
    os.setxattr(fd, LABEL, label)


def rename(parent: int, old: str, new: str) -> None:
    """Rename within a folder, over whatever has the new name, renameat(2)."""
    os.rename(old, new, src_dir_fd=parent, dst_dir_fd=parent)


def remove_file(parent: int, name: str) -> None:
    """Remove a file or link from a folder, unlinkat(2)."""
    os.unlink(name, dir_fd=parent)


def remove_folder(parent: int, name: str) -> None:
    """Remove an empty folder from a folder, unlinkat(2)."""
    os.rmdir(name, dir_fd=parent)


def change_owner(parent: int, name: str, owner: tuple[int, int]) -> None:
    """Give a file, folder or link (itself) to a user and a group, fchownat(2)."""
    os.chown(name, *owner, dir_fd=parent, follow_symlinks=False)


def give(fd: int, owner: tuple[int, int]) -> None:
    """Give what a descriptor points at, a link itself, to a user and a group, fchownat(2)."""
    if _libc.fchownat(fd, b"", *owner, AT_EMPTY_PATH) != 0:
        raise _os_error("")


def detach_mount(mount_fd: int) -> None:
    """Detach the attached mount whose root the descriptor is, umount2(2).

    Goes through /proc/self/fd, so /proc must be mounted in the current namespace.
    """
    path = f"/proc/self/fd/{mount_fd}"
    if _libc.umount2(path.encode(), MNT_DETACH) != 0:
        raise _os_error(path)


def enter_mount_namespace(fd: int, path: str) -> None:
    """Move this (single-threaded) process into a mount namespace, setns(2)."""
    if _libc.setns(fd, CLONE_NEWNS) != 0:
        raise _os_error(path)


def act_as(owner: tuple[int, int]) -> None:
    """Have what this process makes belong to a user and a group, setfsuid(2), setfsgid(2).

    Any other user than 0 has less rights to files until this is called with 0 again.
    """
    _libc.setfsgid(owner[1])
    _libc.setfsuid(owner[0])


def set_no_new_privileges() -> None:
    """Forbid this process and its children to gain privileges, prctl(2)."""
    pr_set_no_new_privs = 38  # include/uapi/linux/prctl.h
    if _libc.prctl(pr_set_no_new_privs, 1, 0, 0, 0) != 0:
        raise _os_error("prctl")


def give_up_root(uid: int, gid: int, *, rootless: bool) -> None:
    """Become another user for good, without a way back; OSError where that can't be.

    In a user's own namespace (``rootless``), which may map none, stay that user.
    """
    set_no_new_privileges()
    if os.geteuid() == 0:
        try:
            os.setgroups([])
            os.setresgid(gid, gid, gid)
            os.setresuid(uid, uid, uid)
        except OSError:
            if not rootless:
                raise
    die_with_parent()  # only now: the kernel forgets it when a process changes its user


def end_after(seconds: int) -> None:
    """Have the kernel kill this process in so many seconds, whatever it does; 0: not any more.

    Also one that is stopped (SIGSTOP) by then, which alarm(2) would leave as it is. A fork has
    no such end, and nor has what this process becomes (execve). Source: timer_create(2).
    """
    pid = os.getpid()
    if pid not in _ends:
        # struct sigevent: a value, the signal, and SIGEV_SIGNAL, which is 0
        event = bytes(8) + _SIGKILL.to_bytes(4, sys.byteorder) + bytes(52)  # protects: sigkill
        timer = (clib.c_long * 1)()
        words = time.CLOCK_MONOTONIC, event, timer
        made = _libc.timer_create(*words)
        # Timers count as signals that wait, and those of all that root has as one number: also of
        # containers whose root is the host's. setrlimit(2)
        if made < 0 and lift_limit(RLIMIT_SIGPENDING):  # protects: others-signals
            made = _libc.timer_create(*words)
        if made < 0:
            raise _os_error("timer_create")
        _ends.clear()  # of a process that has forked us
        _ends[pid] = clib.c_long(timer[0])
    when = _structure(0, 0, seconds, 0)  # struct itimerspec: no second time, seconds and ns
    if _libc.timer_settime(_ends[pid], 0, when, None) < 0:
        raise _os_error("timer_settime")


def lift_limit(number: int) -> bool:
    """Raise a limit of this process' (RLIMIT_*) as far as it may; False where it can't be raised.

    By the C library: this may be where an import would be from a container's image. Source:
    prlimit(2).
    """
    had = (clib.c_long * 2)()  # struct rlimit: the limit that counts, and the most it may be
    _libc.prlimit(0, number, None, had)
    for most in (_RLIM_INFINITY, had[1] & _RLIM_INFINITY):
        if _libc.prlimit(0, number, _structure(most, most), None) == 0:
            return True
    return False


def reap(child: int, seconds: float) -> int | None:
    """Return a child's wait status, None if it hasn't ended in this time."""
    end = time.monotonic() + seconds
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status
        if time.monotonic() >= end:
            return None
        time.sleep(_PAUSE)


def keep_only(descriptors: tuple[int, ...]) -> None:
    """Close all descriptors but these and put /dev/null on the first three.

    For a child that goes on beside its parent: nobody may wait for the end of a pipe that
    it doesn't know it holds, nor for a lock.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        if fd not in descriptors:  # as one is where the caller had closed it
            os.dup2(null, fd)
    start = 3
    for fd in sorted(descriptors):
        if start < fd:
            os.closerange(start, fd)
        start = max(start, fd + 1)
    os.closerange(start, os.sysconf("SC_OPEN_MAX"))


def die_with_parent(*, yes: bool = True) -> None:
    """Have the kernel kill this process when its parent ends, or no more; prctl(2)."""
    pr_set_pdeathsig, sigkill = 1, 9  # include/uapi/linux/prctl.h
    if _libc.prctl(pr_set_pdeathsig, sigkill if yes else 0, 0, 0, 0) != 0:
        raise _os_error("prctl")


def set_name(name: str) -> None:
    """Call this process something, for ps and top: at most 15 characters; prctl(2)."""
    pr_set_name = 15  # include/uapi/linux/prctl.h
    _libc.prctl(pr_set_name, name.encode(), 0, 0, 0)


def forget_personality() -> None:
    """Have the kernel treat this process as any other, personality(2)."""
    _libc.personality(0)


def set_timer_slack(nanoseconds: int) -> None:
    """Set how late this process may be woken when its time has come; prctl(2)."""
    pr_set_timerslack = 29  # include/uapi/linux/prctl.h
    _libc.prctl(pr_set_timerslack, nanoseconds, 0, 0, 0)

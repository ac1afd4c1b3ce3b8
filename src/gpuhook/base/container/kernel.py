"""System calls that Python lacks, each raising OSError with the path concerned.

One function per call, numbers and constants named as in the kernel's headers. This module
and ``rootfs`` are the only ones that change anything in a container.
"""

import errno
import os
import sys
import time

from gpuhook.base.container import clib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Final

# include/uapi/asm-generic/unistd.h: calls added since Linux 5.0 have the same number everywhere.
_OPEN_TREE: "Final" = 428
_MOVE_MOUNT: "Final" = 429
_FSOPEN: "Final" = 430
_FSCONFIG: "Final" = 431
_FSMOUNT: "Final" = 432
_FSPICK: "Final" = 433
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

# include/uapi/linux/stat.h: struct statx starts with the mask of the fields that are filled in
_STATX_INO: "Final" = 0x100
_STATX_BTIME: "Final" = 0x800
_STATX_MNT_ID: "Final" = 0x1000
_STATX_MNT_ID_UNIQUE: "Final" = 0x4000
_STX_INO: "Final" = 0x20
_STX_BTIME: "Final" = 0x50  # seconds in 64 bits, nanoseconds in 32
_STX_DEVICE: "Final" = 0x88  # major and minor of the containing device
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
FSCONFIG_CMD_RECONFIGURE: "Final" = 7
FSPICK_CLOEXEC: "Final" = 1
FSPICK_EMPTY_PATH: "Final" = 8

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

# Flags for creating a file: never replaces an existing one, never follows a link.
CREATE_FLAGS: "Final" = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

_SIGKILL: "Final" = 9
_ends: "dict[int, Any]" = {}  # the timer of this process, by its pid

_PAUSE = 0.0005  # seconds between two checks of a child

_libc = clib.CLibrary()
_libc.syscall.restype = clib.c_long
_statx = (clib.c_long * 64)()  # large enough for struct statx even where a long has four bytes

# Attempts of a path lookup that a concurrent rename disturbed, openat2(2), EAGAIN.
_LOOKUP_ATTEMPTS = 1000  # protects: disturbed-lookup

_HINTS = {
    errno.ENOSYS: "this kernel is older than Linux 5.12, which gpuhook needs",
    errno.EPERM: "the process lacks CAP_SYS_ADMIN or a security module forbids it",
}


def syscall(number: int, *args: object, path: str = "") -> int:
    """Make a system call by its number; bytes and buffers are passed as pointers.

    An int must fit into 32 bits: it is passed as C's int, which libffi widens for a register.
    At most five arguments, so that all fit into registers. Raises OSError with
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
    """Return a structure of 64-bit numbers, for calls that only read it."""
    return b"".join([field.to_bytes(8, sys.byteorder) for field in fields])


def openat2(dir_fd: int, path: str, flags: int, resolve: int, mode: int = 0) -> int:
    """Open a path, with its resolution restricted by RESOLVE_* flags; always close-on-exec.

    Retries while renames elsewhere make the kernel unsure that ``..`` stays inside.
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
    """Clone the target of an O_PATH descriptor into a detached mount, open_tree(2).

    Returns the detached mount's descriptor. ``path`` is only for the error text. Needs
    CAP_SYS_ADMIN and a source in the caller's own mount namespace.
    """
    flags = OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_EMPTY_PATH
    return syscall(_OPEN_TREE, fd, b"", flags, path=path)


def mount_id(fd: int) -> int:
    """Return the id of the mount through which a descriptor was opened, statx(2).

    It is the one in /proc/PID/mountinfo. Needs Linux 5.8.
    """
    return _stated(fd, _STATX_MNT_ID, _STX_MNT_ID)


def identity(fd: int) -> tuple[int, int]:
    """Return the filesystem and the inode number of a descriptor's file, statx(2).

    The kernel's cached values: the filesystem's server isn't asked.
    """
    inode = _stated(fd, _STATX_INO, _STX_INO)
    told = memoryview(_statx).cast("B")
    return int.from_bytes(told[_STX_DEVICE : _STX_DEVICE + 8], sys.byteorder), inode


def unique_mount_id(fd: int) -> int | None:
    """Return the unique id of a descriptor's mount, not reused until a reboot; statx(2).

    It isn't in mount tables. None before Linux 6.8.
    """
    try:
        return _stated(fd, _STATX_MNT_ID_UNIQUE, _STX_MNT_ID)
    except OSError as error:
        if error.errno == errno.ENOSYS:
            return None
        raise


def is_mounted(unique: int) -> bool:
    """Tell whether a mount is in this namespace, by its ``unique_mount_id``; statmount(2)."""
    # struct mnt_id_req: its size in 32 bits, and 32 unused bits
    request = (32).to_bytes(4, sys.byteorder) + bytes(4)
    request += _structure(unique, _STATMOUNT_MNT_BASIC, 0)
    answer = (clib.c_long * _STATMOUNT_SIZE)()
    try:
        syscall(_STATMOUNT, request, answer, _STATMOUNT_SIZE, 0)
    except FileNotFoundError:
        return False
    return True


def born(fd: int) -> int | None:
    """Return the birth time of a descriptor's file, in ns since 1970, statx(2).

    None if the filesystem doesn't record it; some filesystems then report 0.
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
    """Return a 64-bit field of struct statx; OSError if the kernel doesn't fill it in."""
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
    """Make the attached mount with this root read-only, or writable; mount_setattr(2)."""
    attributes = (MOUNT_ATTR_RDONLY, 0) if yes else (0, MOUNT_ATTR_RDONLY)
    attr = _structure(*attributes, 0, 0)  # struct mount_attr; the propagation is unchanged
    syscall(_MOUNT_SETATTR, fd, b"", AT_EMPTY_PATH, attr, len(attr), path=path)


def attach_mount(mount_fd: int, target_fd: int, path: str) -> None:
    """Attach a detached mount to the file or folder of an O_PATH descriptor, move_mount(2)."""
    flags = MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH
    syscall(_MOVE_MOUNT, mount_fd, b"", target_fd, b"", flags, path=path)


def new_tmpfs(options: dict[str, str], attributes: int) -> int:
    """Create a detached tmpfs with options such as {"mode": "0555"}; return its descriptor."""
    context = syscall(_FSOPEN, b"tmpfs", FSOPEN_CLOEXEC, path="tmpfs")
    try:
        for key, value in options.items():
            arguments = (context, FSCONFIG_SET_STRING, key.encode(), value.encode(), 0)
            syscall(_FSCONFIG, *arguments, path="tmpfs")
        syscall(_FSCONFIG, context, FSCONFIG_CMD_CREATE, None, None, 0, path="tmpfs")
        return syscall(_FSMOUNT, context, FSMOUNT_CLOEXEC, attributes, path="tmpfs")
    finally:
        os.close(context)


def resize_tmpfs(fd: int, size: int, path: str) -> None:
    """Change the size of the tmpfs whose root a descriptor is, fspick(2)."""
    context = syscall(_FSPICK, fd, b"", FSPICK_CLOEXEC | FSPICK_EMPTY_PATH, path=path)
    try:
        words = (FSCONFIG_SET_STRING, b"size", str(size).encode(), 0)
        syscall(_FSCONFIG, context, *words, path=path)
        syscall(_FSCONFIG, context, FSCONFIG_CMD_RECONFIGURE, None, None, 0, path=path)
    finally:
        os.close(context)


def create_file(parent: int, name: str, mode: int) -> int:
    """Create a new file in a folder and return a descriptor for writing, openat(2)."""
    return os.open(name, CREATE_FLAGS, mode, dir_fd=parent)


def create_folder(parent: int, name: str) -> None:
    """Create a new folder in a folder, mode 0755, mkdirat(2)."""
    os.mkdir(name, 0o755, dir_fd=parent)


def create_link(parent: int, name: str, target: str) -> None:
    """Create a new symbolic link in a folder, symlinkat(2)."""
    os.symlink(target, name, dir_fd=parent)


def write(fd: int, data: "bytes | memoryview") -> int:
    """Write as much of the data as the kernel accepts, and return the number of bytes."""
    return os.write(fd, data)


def set_mode(fd: int, mode: int) -> None:
    """Set a file's permission bits, fchmod(2)."""
    os.fchmod(fd, mode)


def set_label(fd: int, label: bytes) -> None:
    """Set a file's SELinux label, fsetxattr(2)."""
    os.setxattr(fd, LABEL, label)


def rename(parent: int, old: str, new: str) -> None:
    """Rename within a folder, replacing an existing file of the new name, renameat(2)."""
    os.rename(old, new, src_dir_fd=parent, dst_dir_fd=parent)


def remove_file(parent: int, name: str) -> None:
    """Remove a file or link from a folder, unlinkat(2)."""
    os.unlink(name, dir_fd=parent)


def remove_folder(parent: int, name: str) -> None:
    """Remove an empty folder from a folder, unlinkat(2)."""
    os.rmdir(name, dir_fd=parent)


def change_owner(parent: int, name: str, owner: tuple[int, int]) -> None:
    """Set the owner and group of a file, folder or link (itself), fchownat(2)."""
    os.chown(name, *owner, dir_fd=parent, follow_symlinks=False)


def give(fd: int, owner: tuple[int, int]) -> None:
    """Set the owner and group of a descriptor's file, or of a link itself, fchownat(2)."""
    if _libc.fchownat(fd, b"", *owner, AT_EMPTY_PATH) != 0:
        raise _os_error("")


def detach_mount(mount_fd: int) -> None:
    """Detach the attached mount with this root, umount2(2).

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
    """Create files as a user and a group from now on, setfsuid(2), setfsgid(2).

    Any user other than 0 has fewer rights to files until this is called with 0 again.
    """
    _libc.setfsgid(owner[1])
    _libc.setfsuid(owner[0])


def set_no_new_privileges() -> None:
    """Forbid this process and its children to gain privileges, prctl(2)."""
    pr_set_no_new_privs = 38  # include/uapi/linux/prctl.h
    if _libc.prctl(pr_set_no_new_privs, 1, 0, 0, 0) != 0:
        raise _os_error("prctl")


def give_up_root(uid: int, gid: int, *, rootless: bool) -> None:
    """Switch to another user for good, without a way back; OSError if impossible.

    In a user namespace (``rootless``), which may map no other, keep the current user.
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
    die_with_parent()  # only now: the kernel resets it when a process changes its user


def end_after(seconds: int) -> None:
    """Let the kernel kill this process after this time, whatever it does; 0 cancels.

    This includes a process that is stopped (SIGSTOP), unlike alarm(2). Forks don't inherit the
    timer, and execve deletes it. Source: timer_create(2).
    """
    pid = os.getpid()
    if pid not in _ends:
        # struct sigevent: a value, the signal, and SIGEV_SIGNAL, which is 0
        event = bytes(8) + _SIGKILL.to_bytes(4, sys.byteorder) + bytes(52)  # protects: sigkill
        timer = (clib.c_long * 1)()
        words = time.CLOCK_MONOTONIC, event, timer
        made = _libc.timer_create(*words)
        # Timers count as pending signals, in one count for all of root's processes, including
        # containers whose root is the host's. setrlimit(2)
        if made < 0 and lift_resource_limit(RLIMIT_SIGPENDING):  # protects: others-signals
            made = _libc.timer_create(*words)
        if made < 0:
            raise _os_error("timer_create")
        _ends.clear()  # of the parent process, before the fork
        _ends[pid] = clib.c_long(timer[0])
    when = _structure(0, 0, seconds, 0)  # struct itimerspec: no interval, seconds and ns
    if _libc.timer_settime(_ends[pid], 0, when, None) < 0:
        raise _os_error("timer_settime")


def lift_resource_limit(number: int) -> bool:
    """Raise a limit of this process (RLIMIT_*) to its maximum; False if it can't be raised.

    Uses the C library: where this runs, an import could come from a container's image. Source:
    prlimit(2).
    """
    had = (clib.c_long * 2)()  # struct rlimit: the soft and the hard limit
    _libc.prlimit(0, number, None, had)
    for most in (_RLIM_INFINITY, had[1] & _RLIM_INFINITY):
        if _libc.prlimit(0, number, _structure(most, most), None) == 0:
            return True
    return False


def reap(child: int, seconds: float) -> int | None:
    """Return a child's wait status, None if it hasn't exited in this time."""
    end = time.monotonic() + seconds
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status
        if time.monotonic() >= end:
            return None
        time.sleep(_PAUSE)


def keep_only(descriptors: tuple[int, ...]) -> None:
    """Close all other descriptors and put /dev/null on the first three.

    For a child that outlives its parent's work: it must not keep open a pipe whose end others
    wait for, nor a lock.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        if fd not in descriptors:  # as one is if the caller had closed it
            os.dup2(null, fd)
    start = 3
    for fd in sorted(descriptors):
        if start < fd:
            os.closerange(start, fd)
        start = max(start, fd + 1)
    os.closerange(start, os.sysconf("SC_OPEN_MAX"))


def die_with_parent(*, yes: bool = True) -> None:
    """Let the kernel kill this process when its parent exits, or stop doing so; prctl(2)."""
    pr_set_pdeathsig, sigkill = 1, 9  # include/uapi/linux/prctl.h
    if _libc.prctl(pr_set_pdeathsig, sigkill if yes else 0, 0, 0, 0) != 0:
        raise _os_error("prctl")


def set_name(name: str) -> None:
    """Set this process's name for ps and top: at most 15 characters; prctl(2)."""
    pr_set_name = 15  # include/uapi/linux/prctl.h
    _libc.prctl(pr_set_name, name.encode(), 0, 0, 0)


def forget_personality() -> None:
    """Reset this process's execution domain to the default, personality(2)."""
    _libc.personality(0)


def set_timer_slack(nanoseconds: int) -> None:
    """Set the maximum delay of this process's timers; prctl(2)."""
    pr_set_timerslack = 29  # include/uapi/linux/prctl.h
    _libc.prctl(pr_set_timerslack, nanoseconds, 0, 0, 0)

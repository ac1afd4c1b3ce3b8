"""Isolation of a program: an immutable copy, namespaces, an own root, no privileges.

A complement of ``kernel``, in its own module because few container starts need it.
Sources: memfd_create(2), clone(2), mount_setattr(2), pivot_root(2), capabilities(7), prctl(2).
"""

import ctypes
import errno
import fcntl
import os
import signal

from gpuhook.base.container import kernel
from gpuhook.base.fileio import write_all

_CLONE3 = 435
_OPEN_TREE = 428
_MOUNT_SETATTR = 442

# include/uapi/linux/fcntl.h
AT_RECURSIVE = 0x8000

# include/uapi/linux/sched.h
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

_MFD_EXEC = 0x10  # include/uapi/linux/memfd.h
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE

# include/uapi/linux/prctl.h and capability.h
_PR_CAPBSET_DROP = 24
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
_CAPABILITY_VERSION_3 = 0x20080522
_CAPABILITIES = 64  # the most that this version can hold

_libc = ctypes.CDLL(None, use_errno=True)


class _CloneArgs(ctypes.Structure):
    """Struct clone_args of include/uapi/linux/sched.h, as of Linux 5.3."""

    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in (
            "flags",
            "pidfd",
            "child_tid",
            "parent_tid",
            "exit_signal",
            "stack",
            "stack_size",
            "tls",
        )
    )


class _MountAttr(ctypes.Structure):
    """Struct mount_attr of include/uapi/linux/mount.h."""

    _fields_ = tuple(
        (name, ctypes.c_uint64) for name in ("attr_set", "attr_clr", "propagation", "userns_fd")
    )


def sealed_program(name: str, data: bytes) -> int:
    """Return a descriptor of an executable, immutable file in memory."""
    fd = _executable_memory(name)
    try:
        write_all(fd, data, kernel.write)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except OSError:
        os.close(fd)
        raise
    return fd


def _executable_memory(name: str) -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create(name, flags | _MFD_EXEC)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return os.memfd_create(name, flags)  # Linux before 6.3 has no MFD_EXEC and needs none


def fork(flags: int) -> int:
    """Fork like os.fork, with the child in new namespaces (CLONE_NEW*); single-threaded only.

    Not for mount namespaces: ``own_mounts`` keeps the working directory.
    """
    args = _CloneArgs(flags=flags, exit_signal=signal.SIGCHLD)
    return kernel.syscall(_CLONE3, ctypes.byref(args), ctypes.sizeof(args), path="clone3")


def own_mounts() -> None:
    """Give this process a private copy of its mount namespace."""
    _check(_libc.unshare(kernel.CLONE_NEWNS), "unshare")
    root = os.open("/", os.O_PATH | os.O_CLOEXEC)
    _set_attributes(root, 0, "/")
    os.close(root)


def clone_here(attributes: int) -> int:
    """Return a detached copy of all mounts in and below the working directory.

    They are private and have the MOUNT_ATTR_* ``attributes``.
    """
    flags = kernel.OPEN_TREE_CLONE | kernel.OPEN_TREE_CLOEXEC | AT_RECURSIVE
    tree = kernel.syscall(_OPEN_TREE, kernel.AT_FDCWD, b".", flags, path=".")
    _set_attributes(tree, attributes, ".")
    return tree


def _set_attributes(fd: int, attributes: int, path: str) -> None:
    attr = _MountAttr(attributes, 0, kernel.MS_PRIVATE, 0)
    flags = kernel.AT_EMPTY_PATH | AT_RECURSIVE
    size = ctypes.sizeof(attr)
    kernel.syscall(_MOUNT_SETATTR, fd, b"", flags, ctypes.byref(attr), size, path=path)


def change_root(tree: int) -> None:
    """Make the detached tree (from ``clone_here``) the root, and unmount the old one."""
    here = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    kernel.attach_mount(tree, here, ".")
    os.close(here)
    os.fchdir(tree)
    _check(_libc.pivot_root(b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", kernel.MNT_DETACH), "umount2")
    os.chdir("/")


def drop_privileges(user: int, group: int) -> None:
    """Become that user permanently, without capabilities and without a way to get any."""
    _check(_libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0), "prctl")
    for number in range(_CAPABILITIES):
        if _libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0) != 0:
            if ctypes.get_errno() == errno.EINVAL:
                break  # the kernel has no more capabilities
            _check(-1, "prctl")
    os.setgroups([])
    os.setresgid(group, group, group)
    os.setresuid(user, user, user)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    nothing = (ctypes.c_uint32 * 6)()
    _check(_libc.capset(header, nothing), "capset")
    kernel.set_no_new_privileges()


def _check(result: int, name: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)

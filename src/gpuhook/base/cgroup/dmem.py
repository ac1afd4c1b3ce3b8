"""Device memory limits in a cgroup, with the kernel's dmem controller (Linux 6.14).

Sources: Documentation/admin-guide/cgroup-v2.rst ("DMEM"), kernel/cgroup/dmem.c. A region is a part
of a device's memory that a driver has registered, for instance drm/0000:03:00.0/vram. Region
names are read from the kernel, never constructed.
"""

import errno
import os

from gpuhook.base.cgroup import access
from gpuhook.base.container import kernel
from gpuhook.base.errors import CgroupError, MemoryLimitError, shown
from gpuhook.base.host import proc as host_proc

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

CONTROLLER = "dmem"
DESCENDANTS = "cgroup.max.descendants"
CAPACITY, MAX, CURRENT = "dmem.capacity", "dmem.max", "dmem.current"
_CONTROL = "cgroup.subtree_control"
_UNLIMITED = "max"
TREE = "/sys/fs/cgroup"  # the conventional mount point of cgroup v2, also for NVIDIA's driver
_REMEDIES = {
    errno.EROFS: "Mount cgroup v2 writable where the engine runs",
    errno.EACCES: "Run the engine as root, outside of a user namespace",
    errno.EPERM: "Run the engine as root, outside of a user namespace",
    errno.EBUSY: "Keep processes out of the cgroups above the container's own",
}


def place_of(
    process: int, proc: str = "/proc", written: "Mapping[int, str] | None" = None
) -> tuple[str, str]:
    """Return the mount point of cgroup v2, and the folder of a container's own cgroup there.

    ``process`` is a descriptor of /proc/PID of its first process; ``proc`` and ``written`` are as
    for ``access.cgroup_of``. MemoryLimitError if the container has no cgroup to itself.
    """
    if not access.in_first_user_namespace(proc):
        raise MemoryLimitError(
            "The engine runs in a user namespace (rootless), and only the host's root can limit "
            "device memory",
            "Run the container with an engine that runs as root, or without a limit",
        )
    try:
        found = access.unified(process, proc, written)
    except CgroupError as error:
        raise MemoryLimitError(f"A memory limit needs cgroup v2: {error.cause}", _V2) from None
    if written is None:  # in a running one, a program may have made mount namespaces
        _check_alone(process, found[1], proc)  # protects: cgroup-alone
        _check_owners(*found)  # protects: cgroup-owners
    return found


def have_no_children(folder: str) -> None:
    """Forbid child cgroups in a cgroup; MemoryLimitError.

    Root in a container that may create user namespaces can mount its own cgroup in one, and
    create child cgroups. The kernel enforces limits of parents; NVIDIA's driver doesn't always.
    """
    try:
        fd = os.open(f"{folder}/{DESCENDANTS}", os.O_WRONLY | os.O_CLOEXEC)
        try:
            kernel.write(fd, b"0")
        finally:
            os.close(fd)
    except OSError as error:
        raise MemoryLimitError(
            f"{folder}/{DESCENDANTS} can't be written: {error.strerror}",
            _REMEDIES.get(error.errno or 0, _OWN),
        ) from None


def _check_owners(tree: str, folder: str) -> None:
    """Refuse a cgroup below one that a user owns: that user could move processes in and out.

    Moving needs write permission to cgroup.procs of the common ancestor (cgroups(7)).
    """
    for path in _above(tree, folder):
        try:
            status = os.stat(f"{path}/cgroup.procs")
        except OSError as error:
            raise MemoryLimitError(f"{path} can't be read: {error.strerror}", _OWN) from None
        if status.st_uid != 0 or status.st_mode & 0o022:
            raise MemoryLimitError(
                f"A memory limit holds only if no user but root moves processes, and other users "
                f"may write to {path}",
                "Let the engine make the container's cgroup somewhere else (--cgroup-parent), or "
                "start it without a limit",
            )


def _check_alone(process: int, folder: str, proc: str) -> None:
    """Refuse a cgroup with processes outside the container's mount namespace; MemoryLimitError.

    The limit would also apply to those processes, and they could replace it later.
    """
    try:
        pids = host_proc.words(host_proc.read(f"{folder}/cgroup.procs").replace(b"\n", b" "))
    except OSError as error:
        raise MemoryLimitError(
            f"{folder}/cgroup.procs can't be read: {error.strerror}", _OWN
        ) from None
    for pid in pids:
        try:
            other = os.stat(f"{proc}/{os.fsdecode(pid)}/ns/mnt")
        except OSError:
            if pid != b"0":  # it has exited; 0 is a process that our /proc doesn't show
                continue
        else:
            if os.path.samestat(other, os.stat("ns/mnt", dir_fd=process)):
                continue
        raise MemoryLimitError(
            f"A memory limit needs a cgroup of the container's own, but {folder} has other "
            "processes",
            _OWN,
        )


_OWN = "Let the engine make a cgroup for each container, or start it without a limit"
_V2 = "Boot with only cgroup v2 (systemd.unified_cgroup_hierarchy=1), or start without a limit"


def regions(tree: str) -> dict[str, int]:
    """Return the size in bytes of each region in the kernel; MemoryLimitError without dmem."""
    try:
        return read(tree, CAPACITY)
    except OSError as error:
        raise MemoryLimitError(
            f"This kernel can't limit device memory: {tree}/{CAPACITY}: {error.strerror}",
            "Use Linux 6.14 or newer with CONFIG_CGROUP_DMEM, and cgroup v2",
        ) from None


def read(folder: str, name: str) -> dict[str, int]:
    """Return the content of a dmem file by region, without unlimited ones; OSError."""
    found = {}
    for line in host_proc.lines(host_proc.read(f"{folder}/{name}")):
        region, _, value = os.fsdecode(line).rpartition(" ")
        if region and value.isascii() and value.isdecimal():
            found[region] = int(value)
    return found


def used(folder: str, devices: "Mapping[str, Iterable[str]]") -> dict[str, tuple[int, int | None]]:
    """Return a cgroup's use of devices, by their regions, and its limit (None: none).

    Empty if the kernel doesn't account for the cgroup.
    """
    try:
        current, most = read(folder, CURRENT), read(folder, MAX)
    except OSError:
        return {}
    found: dict[str, tuple[int, int | None]] = {}
    for name, named in devices.items():
        regions = [region for region in named if region in current]
        limits = [most[region] for region in regions if region in most]
        if regions:
            whole = sum(limits) if len(limits) == len(regions) else None
            found[name] = (sum(current[region] for region in regions), whole)
    return found


def limit(tree: str, folder: str, wanted: "Mapping[str, int]") -> None:
    """Limit regions of a cgroup to these numbers of bytes; MemoryLimitError if that has no effect.

    Enables the controller in all parent cgroups where it is off, as runtimes do for controllers
    that they know. Writes one region at a time: older kernels read no more.
    """
    path = folder
    try:
        for path in _above(tree, folder):
            _enable(path)
        path = f"{folder}/{MAX}"
        for region, number in wanted.items():
            fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
            try:
                kernel.write(fd, f"{region} {number}".encode())
            finally:
                os.close(fd)
        there = read(folder, MAX)
    except OSError as error:
        remedy = "Check that the kernel has the dmem controller, and what manages that cgroup"
        raise MemoryLimitError(
            f"The memory of the container's devices can't be limited: {path}: {error.strerror}",
            _REMEDIES.get(error.errno or 0, remedy),
        ) from None
    for region, number in wanted.items():
        # A kernel may round down to pages, so it may be less, but never more.
        if not 0 <= there.get(region, number + 1) <= number:  # protects: limit-read-back
            raise MemoryLimitError(
                f"The kernel hasn't accepted the limit of {shown(region)} in {folder}",
                "Read the kernel's log, and start without a limit if that can't be fixed",
            )


def _above(tree: str, folder: str) -> list[str]:
    """Return the parent cgroups of one, from the root on."""
    parts = folder[len(tree) :].strip("/").split("/")[:-1]
    return ["/".join([tree, *parts[:count]]) for count in range(len(parts) + 1)]


def _enable(folder: str) -> None:
    path = f"{folder}/{_CONTROL}"
    if CONTROLLER.encode() in host_proc.words(host_proc.read(path).rstrip(b"\n")):
        return
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        kernel.write(fd, f"+{CONTROLLER}".encode())
    finally:
        os.close(fd)

"""Limits of devices' memory in a cgroup, by the kernel's dmem controller (Linux 6.14).

Sources: Documentation/admin-guide/cgroup-v2.rst ("DMEM"), kernel/cgroup/dmem.c. A region is a part
of a device's memory that a driver has registered, drm/0000:03:00.0/vram for instance; what there
are is read from the kernel, and no name is built.
"""

import errno
import os

from gpuhook.ground.cgroup import access
from gpuhook.ground.container import kernel
from gpuhook.ground.errors import CgroupError, LimitError, shown
from gpuhook.ground.host import proc as host_proc

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

CONTROLLER = "dmem"
DESCENDANTS = "cgroup.max.descendants"
CAPACITY, MAX, CURRENT = "dmem.capacity", "dmem.max", "dmem.current"
_CONTROL = "cgroup.subtree_control"
_UNLIMITED = "max"
TREE = "/sys/fs/cgroup"  # where cgroup v2 is, by convention and for NVIDIA's driver
_REMEDIES = {
    errno.EROFS: "Have cgroup v2 mounted writable where the engine runs",
    errno.EACCES: "Run the engine as root, outside of a user namespace",
    errno.EPERM: "Run the engine as root, outside of a user namespace",
    errno.EBUSY: "Keep processes out of the cgroups above the container's own",
}


def place_of(
    process: int, proc: str = "/proc", written: "Mapping[int, str] | None" = None
) -> tuple[str, str]:
    """Return where cgroup v2 is mounted, and the folder of a container's own cgroup there.

    ``process`` is a descriptor of /proc/PID of its first process; ``proc`` and ``written`` as for
    ``access.cgroup_of``. LimitError where no limit can be set for it alone.
    """
    if not access.in_first_user_namespace(proc):
        raise LimitError(
            "The engine runs in a user namespace (rootless), and only the host's root can limit "
            "the memory of devices",
            "Run the container by an engine of root's, or without a limit",
        )
    try:
        found = access.unified(process, proc, written)
    except CgroupError as error:
        raise LimitError(f"A limit of memory needs cgroup v2: {error.cause}", _V2) from None
    if written is None:  # in one that runs, a program may have made mount namespaces
        _check_alone(process, found[1], proc)  # protects: cgroup-alone
        _check_owners(*found)  # protects: cgroup-owners
    return found


def have_no_children(folder: str) -> None:
    """Have nobody make cgroups in one; LimitError.

    Root in a container that may make user namespaces can mount its own cgroup in one, and make
    others there: the kernel sees to what is above them, NVIDIA's driver not everywhere.
    """
    try:
        fd = os.open(f"{folder}/{DESCENDANTS}", os.O_WRONLY | os.O_CLOEXEC)
        try:
            kernel.write(fd, b"0")
        finally:
            os.close(fd)
    except OSError as error:
        raise LimitError(
            f"{folder}/{DESCENDANTS} can't be written: {error.strerror}",
            _REMEDIES.get(error.errno or 0, _OWN),
        ) from None


def _check_owners(tree: str, folder: str) -> None:
    """Refuse a cgroup below one of a user's: he may move processes between all that are there.

    That takes the right to write to cgroup.procs of what is above both (cgroups(7)).
    """
    for path in _above(tree, folder):
        try:
            status = os.stat(f"{path}/cgroup.procs")
        except OSError as error:
            raise LimitError(f"{path} can't be looked at: {error.strerror}", _OWN) from None
        if status.st_uid != 0 or status.st_mode & 0o022:
            raise LimitError(
                f"A limit of memory holds where root alone moves processes, and {path} isn't "
                "root's alone",
                "Let the engine make the container's cgroup somewhere else (--cgroup-parent), or "
                "start it without a limit",
            )


def _check_alone(process: int, folder: str, proc: str) -> None:
    """Refuse a cgroup of which a process isn't in the container's mount namespace; LimitError.

    The limit would be that of others, too, and what they set later would replace it.
    """
    try:
        pids = host_proc.words(host_proc.read(f"{folder}/cgroup.procs").replace(b"\n", b" "))
    except OSError as error:
        raise LimitError(f"{folder}/cgroup.procs can't be read: {error.strerror}", _OWN) from None
    for pid in pids:
        try:
            other = os.stat(f"{proc}/{os.fsdecode(pid)}/ns/mnt")
        except OSError:
            if pid != b"0":  # it has ended; 0 is one that our /proc doesn't show
                continue
        else:
            if os.path.samestat(other, os.stat("ns/mnt", dir_fd=process)):
                continue
        raise LimitError(
            f"A limit of memory is for a cgroup of the container's own, and others are in {folder}",
            _OWN,
        )


_OWN = "Let the engine make a cgroup for each container, or start it without a limit"
_V2 = "Boot with cgroup v2 alone (systemd.unified_cgroup_hierarchy=1), or start without a limit"


def regions(tree: str) -> dict[str, int]:
    """Return the size in bytes of each region that the kernel knows; LimitError without dmem."""
    try:
        return read(tree, CAPACITY)
    except OSError as error:
        raise LimitError(
            f"This kernel has no limits of devices' memory: {tree}/{CAPACITY}: {error.strerror}",
            "Use Linux 6.14 or newer with CONFIG_CGROUP_DMEM, and cgroup v2",
        ) from None


def read(folder: str, name: str) -> dict[str, int]:
    """Return what a dmem file says, by region, without those that are unlimited; OSError."""
    found = {}
    for line in host_proc.lines(host_proc.read(f"{folder}/{name}")):
        region, _, value = os.fsdecode(line).rpartition(" ")
        if region and value.isascii() and value.isdecimal():
            found[region] = int(value)
    return found


def used(folder: str, devices: "Mapping[str, Iterable[str]]") -> dict[str, tuple[int, int | None]]:
    """Return what a cgroup uses of devices, by their regions, and its limit (None: none).

    Nothing where the kernel counts nothing there.
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
    """Limit regions of a cgroup to so many bytes; LimitError where that doesn't hold afterwards.

    The controller is enabled in all cgroups above where it isn't, as runtimes do for those that
    they know. One region is written at a time: older kernels read no more.
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
        remedy = "See that the kernel has the dmem controller, and who manages that cgroup"
        raise LimitError(
            f"The memory of the container's devices can't be limited: {path}: {error.strerror}",
            _REMEDIES.get(error.errno or 0, remedy),
        ) from None
    for region, number in wanted.items():
        # A kernel may count in pages, so it may be less; it is never more.
        if not 0 <= there.get(region, number + 1) <= number:  # protects: limit-read-back
            raise LimitError(
                f"The kernel hasn't taken the limit of {shown(region)} in {folder}",
                "Look at the kernel's log, and start without a limit if it can't be mended",
            )


def _above(tree: str, folder: str) -> list[str]:
    """Return the cgroups above one, from the root on."""
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

"""Tracking of our mounts in a root folder, even if its owner has moved them.

Linux 6.8 and later have unique mount ids. On older kernels, and in another mount namespace than
that of the mounts, a mount counts as ours if it is in the folder, wasn't there before, and shows a
file that we have mounted.
"""

import contextlib
import os
from collections.abc import Callable, Iterator

from gpuhook.base.container import kernel
from gpuhook.base.host import proc
from gpuhook.hpc.rootfs.record import FolderRecord, MountRecord, boot

_HIDDEN = "it is hidden by another mount"
_LOOK = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


def attached(tree: int) -> MountRecord:
    """Return the identity of a mount that isn't attached yet; OSError on an old kernel."""
    return MountRecord(kernel.unique_mount_id(tree), kernel.mount_id(tree), *kernel.identity(tree))


def namespace() -> int:
    """Return the number of our mount namespace."""
    return os.stat("/proc/self/ns/mnt").st_ino


def table(folder: str) -> list[list[str]]:
    """Return the mounts in a folder: path in it, filesystem, and root in the filesystem."""
    return [_described(mount, point, folder) for mount, point in _below(folder)]


def _below(folder: str) -> Iterator[tuple[proc.MountInfo, str]]:
    for mount, point in _all():
        if point == folder or point.startswith(f"{folder.rstrip('/')}/"):
            yield mount, point


def _all() -> Iterator[tuple[proc.MountInfo, str]]:
    for mount in proc.Mounts(proc.read("/proc/self/mountinfo")):
        yield mount, proc.unescaped(mount.point)


def _described(mount: proc.MountInfo, point: str, folder: str) -> list[str]:
    return [point.removeprefix(folder), os.fsdecode(mount.device), os.fsdecode(mount.root)]


def take_off(record: FolderRecord, folder: str, on: str = "") -> list[str]:
    """Unmount our remaining mounts, or only those ``on`` a path; return failures as sentences.

    ``folder`` is the folder's current path.
    """
    if record.boot != boot():
        return []
    look = _by_id if _has_ids(record) else _by_file
    failed: dict[int, str] = {}
    while sum(_detached(*each, failed) for each in look(record, folder, on)):
        pass  # mounts below it are visible now
    return [
        f"the mount on {point} can't be unmounted: {failed.get(number, 'it is out of reach')}"
        for number, point in _left(record, failed)
    ]


def left(record: FolderRecord) -> list[str]:
    """Return the mount points of our remaining mounts, as far as the kernel shows them."""
    return [point for _, point in _left(record, {})] if record.boot == boot() else []


def elsewhere(record: FolderRecord) -> str | None:
    """Return a process in another mount namespace that still has a mount of ours."""
    if record.boot != boot() or record.namespace == namespace():
        return None
    ours = {mount.number for mount in record.mounts}
    for process in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has exited
            if os.stat(f"/proc/{process}/ns/mnt").st_ino == record.namespace:
                table = proc.Mounts(proc.read(f"/proc/{process}/mountinfo"))
                return process if any(int(mount.id) in ours for mount in table) else None
    return None


def _has_ids(record: FolderRecord) -> bool:
    same = record.namespace == namespace()
    return same and all(mount.unique is not None for mount in record.mounts)


Ours = Callable[[int], bool]


def _by_id(
    record: FolderRecord, folder: str, on: str
) -> Iterator[tuple[proc.MountInfo, str, Ours]]:
    """Yield mounts that may be ours, the newest first, with a test for a descriptor of each."""
    del folder  # its owner may have moved them out of it
    ids = {mount.unique for mount in record.mounts}
    numbers = {mount.number for mount in record.mounts}
    for mount, point in [*_all()][::-1]:
        if int(mount.id) in numbers and on in ("", point):
            yield mount, point, lambda fd: kernel.unique_mount_id(fd) in ids


def _by_file(
    record: FolderRecord, folder: str, on: str
) -> Iterator[tuple[proc.MountInfo, str, Ours]]:
    """Yield mounts that may be ours, as above."""
    files = {(mount.device, mount.inode) for mount in record.mounts}
    for mount, point in [*_below(folder)][::-1]:
        if _described(mount, point, folder) not in record.there and on in ("", point):
            yield mount, point, lambda fd: kernel.identity(fd) in files


def _detached(mount: proc.MountInfo, point: str, is_ours: Ours, failed: dict[int, str]) -> bool:
    """Unmount a mount and those on top of it; return whether it succeeded.

    The reason of a failure is in ``failed``, by the mount's number.
    """
    number = int(mount.id)
    failed.pop(number, None)
    try:
        fd = os.open(point, _LOOK)
        try:
            if kernel.mount_id(fd) != number:
                failed[number] = _HIDDEN
            elif is_ours(fd):  # protects: mount-by-id
                kernel.detach_mount(fd)
                return True
        finally:
            os.close(fd)
    except (FileNotFoundError, NotADirectoryError):
        failed[number] = _HIDDEN
    except OSError as error:
        failed[number] = error.strerror or str(error)
    return False


def _left(record: FolderRecord, failed: dict[int, str]) -> list[tuple[int, str]]:
    """Return the numbers and mount points of our remaining mounts."""
    if _has_ids(record):
        mounts = [each for each in record.mounts if each.unique and kernel.is_mounted(each.unique)]
        ours = {each.number for each in mounts}
    elif record.namespace == namespace():
        ours = {each.number for each in record.mounts}.intersection(failed)
    else:
        return []
    points = {int(mount.id): point for mount, point in _all()}
    return [(number, points.get(number, "a path out of reach")) for number in sorted(ours)]

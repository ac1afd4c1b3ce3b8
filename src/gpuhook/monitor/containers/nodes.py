"""Host device nodes of a process: mounted ones, and those created in its /dev.

Its mount table shows the mounted ones. Its /dev is read only if that can't block on a filesystem
served by another process (FUSE).
"""

import contextlib
import itertools
import os
import stat
from collections.abc import Iterable, Iterator

from gpuhook.base.container import kernel
from gpuhook.base.container.rootfs import Rootfs
from gpuhook.base.host import proc
from gpuhook.core.inventory.model import Inventory
from gpuhook.monitor.host.namespaces import NamespaceScan

_MAX_NODES = 1 << 14  # most entries of a container's /dev to read
_RESOLVE_CACHED = 0x20  # linux/openat2.h, Linux 5.12: EAGAIN instead of asking a filesystem
# Kernel filesystems, which never block on another process.
_LOCAL = frozenset(
    {
        b"ext4",
        b"xfs",
        b"btrfs",
        b"zfs",
        b"f2fs",
        b"tmpfs",
        b"devtmpfs",
        b"squashfs",
        b"erofs",
    }
)

Numbers = tuple[int, int]  # a device's major and minor number


class HostNodes:
    """The nodes of the driver roots, and their entries in a mount table."""

    def __init__(self, inventories: Iterable[Inventory]) -> None:
        self.numbers: set[Numbers] = set()
        self.by_place: dict[tuple[bytes, str], Numbers] = {}
        self.folders = {"."}
        for inventory in inventories:
            for node in inventory.nodes:
                self.numbers.add(node.numbers)
                self.folders.add(os.path.dirname(node.inside or node.path)[len("/dev/") :] or ".")
            self.by_place.update(self._places(inventory))

    def _places(self, inventory: Inventory) -> Iterator[tuple[tuple[bytes, str], Numbers]]:
        """Yield ((filesystem, path in it), numbers) in the form of proc_pid_mountinfo(5)."""
        table = proc.Mounts(proc.data_of("/proc/self/mountinfo"))
        with Rootfs(inventory.root) as root:
            for node in inventory.nodes:
                try:
                    fd = root.open(node.path)
                except OSError:
                    continue
                try:
                    path = os.readlink(f"/proc/self/fd/{fd}")
                    mount = table.find(b"%d" % kernel.mount_id(fd))
                finally:
                    os.close(fd)
                if mount is not None:
                    below = path.removeprefix(proc.unescaped(mount.point).rstrip("/"))
                    place = proc.unescaped(mount.root).rstrip("/") + below
                    yield (mount.device, place), node.numbers


def nodes_of(entry: str, host: HostNodes, look: NamespaceScan) -> Iterator[Numbers]:
    """Yield the numbers of the host's nodes that are mounted for a process, or in its /dev."""
    data = look.table(entry)
    if data is None:
        return
    table = proc.Mounts(data)
    for mount in table:
        numbers = host.by_place.get((mount.device, proc.unescaped(mount.root)))
        if numbers is not None:
            yield numbers
    if _user_namespace(entry) == _user_namespace("self"):  # else no nodes can be created there
        with contextlib.suppress(OSError):  # it has no /dev
            yield from host.numbers & set(_made_nodes(entry, table, host.folders, look))


def _user_namespace(entry: str) -> int:
    return os.stat(f"/proc/{entry}/ns/user").st_ino


def _made_nodes(
    entry: str, table: proc.Mounts, folders: Iterable[str], look: NamespaceScan
) -> Iterator[Numbers]:
    """Yield the numbers of the nodes in ``folders`` of a process' /dev, using its mount table.

    No link is followed and no mount entered except /dev itself, and that only if it is a
    kernel filesystem: on another one, or on the layers of an overlay, the call could block on
    the process that serves it.
    """
    with _opened(f"/proc/{entry}/root") as root:
        within = kernel.RESOLVE_NO_SYMLINKS
        if not is_local(root, table):
            within |= _RESOLVE_CACHED  # protects: cached-dev
        with _held(kernel.openat2(root, "dev", os.O_PATH | os.O_DIRECTORY, within)) as dev:
            if is_local(dev, table):
                for folder in folders:
                    yield from _nodes_in(dev, folder, look)


def is_local(fd: int, table: proc.Mounts) -> bool:
    """Tell whether a file is on a kernel filesystem, by the mount table of its namespace."""
    mount = table.find(b"%d" % kernel.mount_id(fd))
    return mount is not None and mount.kind in _LOCAL  # protects: local-filesystem


def _nodes_in(dev: int, folder: str, look: NamespaceScan) -> Iterator[Numbers]:
    within = kernel.RESOLVE_NO_SYMLINKS | kernel.RESOLVE_NO_XDEV
    try:
        opened = kernel.openat2(dev, folder, os.O_RDONLY | os.O_DIRECTORY, within)
    except OSError:
        return
    with _held(opened) as fd, os.scandir(fd) as entries:
        for entry in itertools.islice(entries, _MAX_NODES):
            if not look.goes_on():
                return
            try:
                node = kernel.openat2(fd, entry.name, os.O_PATH, within)
            except OSError:
                continue  # a link, or a mount, which the mount table already shows
            with _held(node):
                status = os.fstat(node)
            if stat.S_ISCHR(status.st_mode):
                yield os.major(status.st_rdev), os.minor(status.st_rdev)


def has_our_root(entry: str) -> bool:
    """Tell whether a process has our root folder, as in a plain mount namespace.

    The process that serves its filesystem isn't queried.
    """
    with _opened(f"/proc/{entry}/root") as theirs, _opened("/") as ours:
        return kernel.identity(theirs) == kernel.identity(ours)


@contextlib.contextmanager
def _held(fd: int) -> Iterator[int]:
    """Close a descriptor at the end of the block."""
    try:
        yield fd
    finally:
        os.close(fd)


def _opened(path: str) -> contextlib.AbstractContextManager[int]:
    return _held(os.open(path, os.O_PATH | os.O_CLOEXEC))

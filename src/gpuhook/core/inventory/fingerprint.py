"""Fingerprint of a host: a cheap check whether an inventory is still valid.

It has only names, small texts and file statuses, but no times from /proc: the inodes there are
created again in every mount, and whenever memory is short.
"""

import os
import stat
import time

from gpuhook import __version__
from gpuhook.base.errors import UntrustedPathError
from gpuhook.base.state_directory import BOOT_ID

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any, Protocol

    from gpuhook.base.config.model import Config
    from gpuhook.base.container.rootfs import Rootfs
    from gpuhook.core.inventory.model import DeviceNode, Inventory

    class InventorySource(Protocol):
        """Source of an inventory: the part of a vendor that is used here."""

        @property
        def names(self) -> Any:
            """The vendor's names."""

        @property
        def inventory(self) -> type[Inventory]:
            """The class of its inventory."""

        @property
        def settings(self) -> tuple[str, ...]:
            """The settings that affect an inventory, without the root: attributes of Config."""

        @property
        def crowded(self) -> tuple[str, ...]:
            """Folders with too many nodes to check each one."""

        def root(self, config: Config) -> str:
            """Return the driver root."""

        def discover(self, config: Config) -> Inventory:
            """Discover the devices; DriverError if there is no driver."""

        def cache_key(self, config: Config) -> list[Any]:
            """Return JSON values; an inventory is stale once they change."""

        def withheld(self, config: Config) -> list[str]:
            """Return nodes that this process may not open: it sees only some devices."""

        def volatile_paths(self, config: Config) -> list[str]:
            """Return paths that make an inventory stale when they appear."""

        def watched_paths(self, config: Config) -> list[str]:
            """Return folders that make an inventory stale when names in them change."""


_SETTLED = 2.0  # seconds, more than the timestamp granularity of any local filesystem


def settings_of(config: "Config", vendor: "InventorySource") -> "list[Any]":
    """Return the settings that a vendor's inventory depends on, as JSON values."""
    values = [vendor.root(config), *(getattr(config, name) for name in vendor.settings)]
    return [list(value) if isinstance(value, tuple) else value for value in values]


def of(config: "Config", vendor: "InventorySource") -> "list[Any]":
    """Return an inventory's fingerprint as JSON values: if any changes, the inventory may too."""
    return [
        __version__,
        # The vendor's folder: replaced code may differ even in the same version.
        status(os.path.dirname(vendor.names.__file__)),
        settings_of(config, vendor),
        text(BOOT_ID),
        *vendor.cache_key(config),
    ]


def same_nodes(root: str, nodes: "Iterable[DeviceNode]", crowded: tuple[str, ...]) -> bool:
    """Tell whether these device nodes are unchanged, including owner and mode.

    Nodes in a ``crowded`` folder are covered by the folder's own status: there may be thousands.
    """
    root = root.rstrip("/")
    for node in nodes:
        if node.path.rpartition("/")[0] in crowded:
            continue
        try:
            found = os.stat(root + node.path)
        except OSError:
            return False
        now = (found.st_rdev, found.st_mode, found.st_uid, found.st_gid)
        rdev = os.makedev(node.major, node.minor)
        if now != (rdev, stat.S_IFCHR | node.mode, node.uid, node.gid):
            return False
    return True


def missing(root: str, paths: "Iterable[str]") -> list[str]:
    """Return the paths below the driver root that don't exist."""
    return [path for path in paths if not _exists(_below(root, path))]


def absent(root: str, paths: "Iterable[str]") -> list[str]:
    """Return the first missing path component of each path below the driver root.

    Without duplicates: many paths lack the same folder, and a folder may have several names.
    Missing top-level folders don't count, because they may appear for any reason.
    """
    found: dict[object, str] = {}
    for path in paths:
        folder, _, rest = path.strip("/").partition("/")
        for name in rest.split("/"):
            place = f"{folder}/{name}"
            if not _exists(_below(root, f"/{place}")):
                found.setdefault((_identity(_below(root, f"/{folder}")), name), f"/{place}")
                break
            folder = place
    return list(found.values())


def _identity(folder: str) -> object:
    try:
        status = os.stat(folder)
    except OSError:
        return folder
    return status.st_dev, status.st_ino


def watched(root: str, paths: "Iterable[str]") -> "dict[str, list[int]]":
    """Return the statuses of the paths below the driver root that only root can change.

    Other users could use a folder of theirs to make inventories stale at will.
    """
    from gpuhook.base.container.rootfs import Rootfs  # noqa: PLC0415 - as in settled

    found = {}
    try:
        with Rootfs(root) as host:
            for path in paths:
                seen = status(_below(root, path))
                if seen is not None and _is_own(host, path):
                    found[path] = seen
    except OSError:
        pass  # the root doesn't exist
    return found


def _is_own(host: "Rootfs", path: str) -> bool:
    try:
        real = host.own_path(path)
        found = host.stat(real)
        if found is not None and stat.S_ISDIR(found.st_mode):
            host.own_folder(real)  # protects: watched-folders
    except (OSError, UntrustedPathError):
        return False
    return True


def same_statuses(root: str, seen: "dict[str, list[int]]") -> bool:
    """Tell whether files and folders below the driver root have the statuses of ``watched``."""
    return all(status(_below(root, path)) == before for path, before in seen.items())


def _below(root: str, path: str) -> str:
    # /var/run is often an absolute link, which below a driver root leads elsewhere.
    return root.rstrip("/") + path.replace("/var/run/", "/run/")


def folders(root: str, paths: "Iterable[str]") -> list[str]:
    """Return the folders of paths below the driver root, without duplicates, sorted."""
    return sorted({_below(root, path).rpartition("/")[0] for path in paths})


def identity(path: str) -> "tuple[int, ...] | None":
    """Return the identity of a file or folder, which changes with it; None if it doesn't exist.

    A folder's stays the same while no name in it is added, removed or replaced (inode(7), mtime).
    """
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def is_settled(path: str) -> bool:
    """Tell whether the next change of a file or folder will change its times.

    Times are as coarse as the kernel's clock: the second of two quick changes doesn't show. A time
    in the future predates a clock that was set back. False if the path doesn't exist.
    """
    try:
        return abs(time.time() - os.stat(path).st_ctime) >= _SETTLED
    except OSError:
        return False


def settled(root: str, paths: "Iterable[str]") -> list[str]:
    """Return the paths below the driver root that only root can create."""
    from gpuhook.base.container.rootfs import Rootfs  # noqa: PLC0415 - only to make an inventory

    found = []
    try:
        with Rootfs(root) as host:
            for path in paths:
                try:
                    host.own_path(path)
                except UntrustedPathError:
                    continue
                except OSError:
                    pass
                found.append(path)
    except OSError:
        pass  # the root doesn't exist, so there is nothing to wait for
    return found


def _exists(path: str) -> bool:
    """Tell whether a name exists, even if it is a dangling link."""
    # Like os.path.lexists, in half the time.
    return os.access(path, os.F_OK, follow_symlinks=False)


def names(folder: str) -> list[str]:
    """Return the names in a folder, sorted; none if it can't be read."""
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def text(path: str) -> str:
    """Return the beginning of a small file, "" if it can't be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return ""
    try:
        return os.read(fd, 1 << 12).decode("ascii", "replace")
    except OSError:
        return ""
    finally:
        os.close(fd)


def status(path: str) -> "list[int] | None":
    """Return the status fields that change with a file or folder; None if it doesn't exist."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return [found.st_ino, found.st_size, found.st_mtime_ns]

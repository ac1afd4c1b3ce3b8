"""What tells at little cost whether a machine still is as it was when an inventory was made.

Names, small texts and file statuses alone, no times of anything in /proc: its inodes are
made again in every mount of it, and whenever memory is short.
"""

import os
import stat
import time

from gpuhook import __version__
from gpuhook.ground.errors import UntrustedPathError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any, Protocol

    from gpuhook.ground.config.model import Config
    from gpuhook.ground.container.rootfs import Rootfs
    from gpuhook.start.inventory.model import Inventory, Node

    class Source(Protocol):
        """Where an inventory comes from: what is used here of a vendor."""

        @property
        def names(self) -> Any:
            """The vendor's names."""

        @property
        def inventory(self) -> type[Inventory]:
            """The class of its inventory."""

        @property
        def settings(self) -> tuple[str, ...]:
            """The settings that an inventory depends on beside the root, attributes of Config."""

        @property
        def crowded(self) -> tuple[str, ...]:
            """Folders whose nodes are too many to look at each."""

        def root(self, config: Config) -> str:
            """Return the driver root."""

        def discover(self, config: Config) -> Inventory:
            """Look at the machine; DriverError where there is no driver."""

        def surroundings(self, config: Config) -> list[Any]:
            """Return, as JSON values, what a change of makes an inventory stale."""

        def withheld(self, config: Config) -> list[str]:
            """Return paths of nodes that this process may not open, so that it sees a part."""

        def volatile_paths(self, config: Config) -> list[str]:
            """Return paths whose coming makes an inventory stale."""

        def watched_paths(self, config: Config) -> list[str]:
            """Return folders in which a change of names makes an inventory stale."""


_SETTLED = 2.0  # seconds, more than the times of any local filesystem are coarse
_BOOT_ID = "/proc/sys/kernel/random/boot_id"


def settings_of(config: "Config", vendor: "Source") -> "list[Any]":
    """Return what a vendor's inventory depends on of the settings, as JSON values."""
    values = [vendor.root(config), *(getattr(config, name) for name in vendor.settings)]
    return [list(value) if isinstance(value, tuple) else value for value in values]


def surroundings(config: "Config", vendor: "Source") -> "list[Any]":
    """Return, as JSON values, what an inventory was made in: any change may change it."""
    return [
        __version__,
        # The vendor's folder: code that was replaced is another one, of the same version too.
        status(os.path.dirname(vendor.names.__file__)),
        settings_of(config, vendor),
        text(_BOOT_ID),
        *vendor.surroundings(config),
    ]


def same_nodes(root: str, nodes: "Iterable[Node]", crowded: tuple[str, ...]) -> bool:
    """Tell whether these device nodes are what they were, owner and mode included.

    Those in a ``crowded`` folder are left to the folder's own status: there may be thousands.
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
    """Return those of the paths below the driver root that don't exist."""
    return [path for path in paths if not _exists(_below(root, path))]


def absent(root: str, paths: "Iterable[str]") -> list[str]:
    """Return what would have to be made first for the paths below the driver root that don't exist.

    Each once: many paths lack the same folder, and a folder may have several names. A folder at
    the top isn't meant, which may come for any reason.
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
    """Return the statuses of those of the paths below the driver root that are root's own.

    A folder that others may change would have them make inventories stale as they like.
    """
    from gpuhook.ground.container.rootfs import Rootfs  # noqa: PLC0415 - as in settled

    found = {}
    try:
        with Rootfs(root) as host:
            for path in paths:
                seen = status(_below(root, path))
                if seen is not None and _is_own(host, path):
                    found[path] = seen
    except OSError:
        pass  # there is no such root
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
    # /var/run is a link, often an absolute one, which below a driver root leads elsewhere.
    return root.rstrip("/") + path.replace("/var/run/", "/run/")


def folders(root: str, paths: "Iterable[str]") -> list[str]:
    """Return the folders in which paths below the driver root are, each once, sorted."""
    return sorted({_below(root, path).rpartition("/")[0] for path in paths})


def identity(path: str) -> "tuple[int, ...] | None":
    """Return what tells a file or folder from what it was; None where there is none.

    Of a folder: while it stays, no name was added, removed or replaced in it (inode(7), mtime).
    """
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def is_settled(path: str) -> bool:
    """Tell whether the next change of a file or folder will show in its times.

    They are as coarse as the kernel's clock: of two changes at once, the second doesn't show. A
    time to come is from before the clock was set back. False where there is no such path.
    """
    try:
        return abs(time.time() - os.stat(path).st_ctime) >= _SETTLED
    except OSError:
        return False


def settled(root: str, paths: "Iterable[str]") -> list[str]:
    """Return those of the paths below the driver root that nobody but root can make."""
    from gpuhook.ground.container.rootfs import Rootfs  # noqa: PLC0415 - when an inventory is made alone

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
        pass  # there is no such root, and nothing to wait for
    return found


def _exists(path: str) -> bool:
    """Tell whether there is such a name, even of a link that leads nowhere."""
    # As os.path.lexists does, in half the time.
    return os.access(path, os.F_OK, follow_symlinks=False)


def names(folder: str) -> list[str]:
    """Return the names in a folder, sorted; none where it can't be read."""
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def text(path: str) -> str:
    """Return a small file's beginning, "" where it can't be read."""
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
    """Return what changes of a file or folder when it is changed; None where there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return [found.st_ino, found.st_size, found.st_mtime_ns]

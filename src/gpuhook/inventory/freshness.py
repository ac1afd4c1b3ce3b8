"""What tells, without NVML, whether a machine still is as it was when its inventory was made.

Names, small texts and file statuses alone, no times of anything in /proc: its inodes are
made anew in every mount of it, and whenever memory is short.
"""

import os
import stat

from gpuhook import __version__

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from gpuhook.config import Config

# The settings that an inventory depends on; another value of one means another inventory.
SETTINGS = (
    "driver_root",
    "environment",
    "ldcache",
    "library_search_paths",
    "load_kmods",
    "user",
)

_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_PROC = "/proc/driver/nvidia"
# Folders of device nodes that come and go as a whole; the rest lies in /dev itself.
_NODE_FOLDERS = ("nvidia-caps", "nvidia-caps-imex-channels", "infiniband", "dri")
_NODE_PREFIXES = ("nvidia", "gdrdrv")


def settings_of(config: "Config") -> "list[Any]":
    """Return the values of SETTINGS as JSON values."""
    values = [getattr(config, name) for name in SETTINGS]
    return [list(value) if isinstance(value, tuple) else value for value in values]


def surroundings(config: "Config") -> "list[Any]":
    """Return, as JSON values, what an inventory was made in: any change may change it."""
    root = config.driver_root.rstrip("/")
    return [
        __version__,
        _status(os.path.dirname(os.path.dirname(__file__))),
        settings_of(config),
        _text(_BOOT_ID),
        _text(f"{root}{_PROC}/version"),
        _names(f"{root}{_PROC}/gpus"),
        _mig_instances(f"{root}{_PROC}/capabilities"),
        _status(root + (config.ldcache or "/etc/ld.so.cache")),
        [name for name in _names(f"{root}/dev") if name.startswith(_NODE_PREFIXES)],
        [_status(f"{root}/dev/{name}") for name in _NODE_FOLDERS],
    ]


def same_nodes(root: str, nodes: "Iterable[tuple[str, int, int]]") -> bool:
    """Tell whether these device nodes (path, major, minor) are what they were.

    Those of the node folders are left to the folders' own statuses: there may be thousands.
    """
    root = root.rstrip("/")
    for path, major, minor in nodes:
        if path.count("/") > 2:
            continue
        try:
            status = os.stat(root + path)
        except OSError:
            return False
        if status.st_rdev != os.makedev(major, minor) or not stat.S_ISCHR(status.st_mode):
            return False
    return True


def missing(root: str, paths: "Iterable[str]") -> list[str]:
    """Return those of the paths below the driver root that don't exist."""
    root = root.rstrip("/")
    # /var/run is a link, often an absolute one, which below a driver root leads elsewhere.
    return [path for path in paths if not _exists(root + path.replace("/var/run/", "/run/"))]


def _exists(path: str) -> bool:
    """Tell whether there is such a name, even of a link that leads nowhere."""
    # As os.path.lexists does, in half the time.
    return os.access(path, os.F_OK, follow_symlinks=False)


def _mig_instances(folder: str) -> "list[Any]":
    """Return the names of all GPU and compute instances, gone through once.

    The inode is part of it: an instance destroyed and made anew is another one.
    """
    found: list[Any] = []
    for gpu in _names(folder):
        mig = f"{folder}/{gpu}/mig"
        for instance in _names(mig) if _may_have_folders(mig) else ():
            path = f"{mig}/{instance}"
            found.append([gpu, instance, _inode(path), _names(path)])
    return found


def _may_have_folders(path: str) -> bool:
    """Tell whether a folder may have folders in it: each adds a link to it, ``..``.

    It has two links without them, and one on filesystems that don't count.
    """
    try:
        return os.stat(path).st_nlink != 2
    except OSError:
        return False


def _inode(path: str) -> int:
    try:
        return os.stat(path).st_ino
    except OSError:
        return 0


def _names(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _text(path: str) -> str:
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


def _status(path: str) -> "list[int] | None":
    try:
        status = os.stat(path)
    except OSError:
        return None
    return [status.st_ino, status.st_size, status.st_mtime_ns]

"""The launcher's cache: one file in /run with the settings of config.toml that it needs.

The first line identifies the configuration file by device, inode and time. The second is that of
``runtimes``. Then come the trigger strings, one a line: a config.json that requests a GPU contains
at least one. The last line is END_MARKER.

The launcher uses the cache if it belongs to the launcher's user, is complete, identifies the
present config.toml, and is younger than that, that file's folder and the launcher. Otherwise Python
does the work, and writes the cache again. Without a config.toml, the launcher uses its built-in
defaults (launchers/build_launcher.py).

This module runs once after every change of the configuration.
"""

import errno
import os
import time

from gpuhook.base import fileio
from gpuhook.base import names as common
from gpuhook.base.config.loader import load
from gpuhook.base.errors import ConfigError
from gpuhook.core.request import sources
from gpuhook.vendors import registry

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpuhook.base.config.model import Config

# Not below state-dir: the launcher must find it before it knows any setting.
FOLDER = "/run/gpuhook/launcher"
CACHE = "cache"

PATH_CHARACTERS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_./")
# Characters that JSON writes as themselves, or as \u and their number.
_PLAIN = PATH_CHARACTERS - {"/"}
# The first digits of those numbers, for - and ., digits, and letters.
ESCAPES = (
    *("\\u002" + digit for digit in "dDeE"),
    *("\\u003" + digit for digit in "0123456789"),
    *("\\u00" + digit for digit in "4567"),
)
END_MARKER = "=+=+=+=+="  # no trigger string starts with a part of it
_ANY = ("{",)  # in any config.json
_MARGIN = 20_000_000  # nanoseconds by which a file's time may lag behind the clock
LONG_AGO = 1 << 29  # seconds, in 1987: older files were given one fixed time


def words(config: "Config") -> tuple[str, ...] | None:
    """Return the trigger strings: any config.json that requests a GPU contains one of them.

    None if there are none, because the configuration has names that JSON can write in many ways,
    or limits the memory of all devices, including those that engines add.
    """
    if config.limits_memory:
        return None  # protects: limits-launcher
    names = [variable for _, variable in sources.swarm_variables(config.swarm_resource)]
    prefixes = config.cdi_annotation_prefixes if config.reads_annotations else ()
    plain = [_plain_part(name) for name in (*names, *prefixes)]
    if not all(plain):
        return None
    fixed = [
        trigger
        for vendor in registry.all_vendors(config).values()
        for trigger in (
            *vendor.VARIABLES,
            *vendor.LEGACY[:1],
            vendor.MOUNTS.rpartition("/")[2],
            *getattr(vendor, "MEMORY_VARIABLES", ()),
            *getattr(vendor, "MEMORY_ANNOTATIONS", ())[1:],
        )
    ]
    limits = (common.MEMORY_VARIABLE, _plain_part(common.MEMORY_ANNOTATION))
    return (*filter(None, fixed), *limits, *plain, *_shared(config), *ESCAPES)


def _shared(config: "Config") -> "list[str]":
    """Return trigger strings for shared devices, which other programs may add.

    They are the paths of the device nodes, and the device numbers in cgroup rules.
    """
    if not config.mps_devices:
        return []
    nvidia = registry.BUILT_IN["nvidia"]
    return [*nvidia.DRIVER_WORDS, *map(str, nvidia.FIXED_MAJORS)]


def _plain_part(text: str) -> str:
    """Return a text's longest part in which JSON escapes characters only by their number."""
    parts = "".join(char if char in _PLAIN else " " for char in text).split(" ")
    return max(parts, key=len)


def runtimes(config: "Config") -> str:
    """Return the low-level runtimes, each followed by a colon.

    An empty one, first, stands for the engine's own (``Config.low_level_runtimes``).
    """
    engines = () if config.names_runtimes else ("",)
    return "".join(f"{name}:" for name in (*engines, *filter(None, config.runtimes)))


def save(path: str | None) -> None:
    """Write the cache for a configuration file atomically; do nothing for None.

    A failure only costs time. No other user can interfere, as root owns /run. The configuration is
    read here, after its identity was taken.
    """
    if path is None:
        return
    as_of = time.time_ns() - _MARGIN
    try:
        identity = _identity(path)
        config = load(path)
        folder = folder_of(config)
        if folder is None:
            return
        os.makedirs(folder, exist_ok=True)
        # protects: words-for-all
        found = words(config) or _ANY
        text = "\n".join((identity, runtimes(config), *found, END_MARKER, ""))
        fileio.replace(
            f"{folder}/{CACHE}",
            text.encode("ascii"),
            f"{folder}/.{CACHE}.{os.getpid()}",
            mode=0o644,
            finish=lambda fd: os.utime(fd, ns=(as_of, as_of)),
        )
    except (OSError, ConfigError):
        return


def _identity(path: str) -> str:
    """Return the identity of a file in the launcher's format: device, inode, nanoseconds.

    OSError for a writable file with a fixed time: Nix, ostree and reproducible builds give all
    their files the same time, so other content could have the same identity.
    """
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        status = os.fstat(file)
        if status.st_mtime < LONG_AGO and not os.fstatvfs(file).f_flag & os.ST_RDONLY:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)
        return f"{status.st_dev} {status.st_ino} {status.st_mtime_ns}"
    finally:
        os.close(file)


def folder_of(config: "Config") -> str | None:
    """Return the folder of the launcher's cache; None if the launcher couldn't find or read it."""
    path = "/defaults" if config.path is None else config.path
    if not path.startswith("/") or ".." in path:
        return None
    readable = PATH_CHARACTERS.issuperset(path) and all(
        PATH_CHARACTERS.issuperset(name) and ("/" not in name or name.startswith("/"))
        for name in config.runtimes
    )
    return FOLDER + path if readable else None

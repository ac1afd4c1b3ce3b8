"""The launcher's cache: one file in /run with what it must know of config.toml.

The first line says of which configuration file it was made: by device, inode and time. The second
names the low-level runtimes. Then come the trigger strings, of which config.json holds one wherever
a GPU is asked for, a line each; the last line is END_MARKER. The launcher uses it while it is
root's own, whole, of the very file that is there, and younger than that and its folder. Otherwise
Python does the work, and writes the file again. Without a config.toml, the launcher has the
defaults itself (launchers/build_launcher.py).

It runs once after every change of the configuration.
"""

import errno
import os
import time

from gpuhook.ground import fileio
from gpuhook.ground import names as common
from gpuhook.ground.config.loader import load
from gpuhook.ground.errors import ConfigError
from gpuhook.start.request import sources
from gpuhook.vendors import registry

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpuhook.ground.config.model import Config

# Not below state-dir: the launcher has to find it before it has read any configuration.
FOLDER = "/run/gpuhook/launcher"
CACHE = "cache"

PATH_CHARACTERS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_./")
# What JSON has one way to write, or two: itself, and \u and its number.
_PLAIN = PATH_CHARACTERS - {"/"}
# How the number of a plain character may begin, - and . and the digits and the letters.
ESCAPES = (
    *("\\u002" + digit for digit in "dDeE"),
    *("\\u003" + digit for digit in "0123456789"),
    *("\\u00" + digit for digit in "4567"),
)
END_MARKER = "=+=+=+=+="  # no trigger string begins with a part of it
_ANY = ("{",)  # is in any config.json
_MARGIN = 20_000_000  # nanoseconds by which a file's time may lag behind the clock
LONG_AGO = 1 << 29  # seconds, in 1987: files that are older were all given the same time


def words(config: "Config") -> tuple[str, ...] | None:
    """Return words of which one is in any config.json that asks for a GPU.

    None where there are no such words, because the configuration names something that JSON
    could write in many ways, or limits the memory of devices, whoever gave them.
    """
    if config.limits_memory:
        return None  # protects: limits-launcher
    names = [variable for _, variable in sources.swarm_variables(config.swarm_resource)]
    prefixes = config.cdi_annotation_prefixes if config.reads_annotations else ()
    plain = [_plain_part(name) for name in (*names, *prefixes)]
    if not all(plain):
        return None
    fixed = [
        word
        for vendor in registry.known(config).values()
        for word in (
            *vendor.VARIABLES,
            *vendor.LEGACY[:1],
            vendor.MOUNTS.rpartition("/")[2],
            *getattr(vendor, "MEMORY_VARIABLES", ()),
        )
    ]
    limits = (common.MEMORY_VARIABLE, _plain_part(common.MEMORY_ANNOTATION))
    return (*filter(None, fixed), *limits, *plain, *_shared(config), *ESCAPES)


def _shared(config: "Config") -> "list[str]":
    """Return words of which one is in any config.json that gives a device which is shared.

    Its node's path, or its number in a rule.
    """
    if not config.mps_devices:
        return []
    nvidia = registry.KNOWN["nvidia"]
    return [*nvidia.DRIVER_WORDS, *map(str, nvidia.FIXED_MAJORS)]


def _plain_part(text: str) -> str:
    """Return the longest part of a text whose letters JSON escapes by their numbers alone."""
    parts = "".join(char if char in _PLAIN else " " for char in text).split(" ")
    return max(parts, key=len)


def save(path: str | None) -> None:
    """Write the cache for a configuration file, whole or not at all; nothing for None.

    Failing to costs time alone. Root owns /run, so nobody else is in the way. The file is read
    here, after it was looked which one it is.
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
        make_folders(folder)
        # protects: words-for-all
        found = words(config) or _ANY
        runtimes = "".join(f"{name}:" for name in config.runtimes)
        text = "\n".join((identity, runtimes, *found, END_MARKER, ""))
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
    """Return which file a path means, as the launcher writes it: device, inode, nanoseconds.

    OSError for a file of long ago that can be written to: Nix, ostree and reproducible builds
    give all their files one time, so another content could come with the same time.
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
    """Return the folder of the launcher's cache; None where it couldn't find or read it."""
    path = "/defaults" if config.path is None else config.path
    if not path.startswith("/") or ".." in path:
        return None
    readable = PATH_CHARACTERS.issuperset(path) and all(
        PATH_CHARACTERS.issuperset(name) and ("/" not in name or name.startswith("/"))
        for name in config.runtimes
    )
    return FOLDER + path if readable else None


def make_folders(path: str) -> None:
    """Make a folder and those above it; OSError if that fails."""
    if not os.path.isdir(path):
        os.makedirs(path, exist_ok=True)

"""The launcher's cache: what it must know of config.toml, in small files in /run.

``runtimes`` names the low-level runtimes in a line, whose end shows that the file is whole.
``words`` are trigger strings, of which config.json holds one wherever a GPU is asked for, a line
each; END_MARKER is the last line. The launcher uses both while they are younger than config.toml
and its folder, root's own, and made of this very file: ``config`` is a link to it, ``time`` has its
time. Otherwise Python does the work and saves them again.

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
    """Write what the launcher needs of a configuration file (None: there is none).

    Failing to costs time alone. The file is read here, after it was looked which one it is.
    """
    as_of = time.time_ns() - _MARGIN
    try:
        identity = path and _identity(path)
        config = load(path)
        folder = folder_of(config)
        if folder is None:
            return
        make_folders(folder)
        # protects: words-for-all
        found = words(config) or _ANY
        _write(folder, "words", "".join(f"{word}\n" for word in (*found, END_MARKER)), as_of)
        _write(folder, "runtimes", "".join(f"{name}:" for name in config.runtimes) + "\n", as_of)
        if identity:  # the last: what an earlier configuration has left there must not seem its own
            _write(folder, "time", "", identity[1])
            _link(folder, "config", identity[0])
    except (OSError, ConfigError):
        return


def _identity(path: str) -> tuple[str, int]:
    """Return which file a path means, links resolved, and its time in nanoseconds.

    OSError for a file of long ago that can be written to: Nix, ostree and reproducible builds
    give all their files one time, so another content could come with the same time.
    """
    real = os.path.realpath(path)
    status = os.stat(real)
    if status.st_mtime < LONG_AGO and not os.statvfs(real).f_flag & os.ST_RDONLY:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)
    return real, status.st_mtime_ns


def _link(folder: str, name: str, target: str) -> None:
    temporary = f"{folder}/.{name}.{os.getpid()}"
    os.symlink(target, temporary)
    os.rename(temporary, f"{folder}/{name}")


def folder_of(config: "Config") -> str | None:
    """Return the folder of the launcher's files; None where it couldn't find or read them."""
    path = "/defaults" if config.path is None else config.path
    if not path.startswith("/") or ".." in path:
        return None
    readable = PATH_CHARACTERS.issuperset(path) and all(
        PATH_CHARACTERS.issuperset(name) and ("/" not in name or name.startswith("/"))
        for name in config.runtimes
    )
    return FOLDER + path if readable else None


def _write(folder: str, name: str, content: str, as_of: int) -> None:
    """Write a file whole or not at all, as of that time; OSError if that fails.

    Root owns /run, so nobody else is in the way.
    """
    fileio.replace(
        f"{folder}/{name}",
        content.encode("ascii"),
        f"{folder}/.{name}.{os.getpid()}",
        mode=0o644,
        finish=lambda fd: os.utime(fd, ns=(as_of, as_of)),
    )


def make_folders(path: str) -> None:
    """Make a folder and those above it; OSError if that fails."""
    if not os.path.isdir(path):
        os.makedirs(path, exist_ok=True)

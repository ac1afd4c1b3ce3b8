"""What the launcher, a shell script, must know of config.toml: small files in /run.

``runtimes`` names the low-level runtimes, ``machine`` the driver's root, ``words`` what
config.json holds wherever a GPU is asked for, ``settings`` what it may hold that decides on
which device nodes, as names or, as they are learned, with their values. The launcher takes
them for right while they are younger than config.toml and its folder, and root's own;
otherwise Python does the work and leaves them anew.

Hot path: imports os.
"""

import errno
import os
import time

from gpuhook import environment, mount_requests, requirements
from gpuhook.request import DEVICE_VARIABLES, VISIBLE_DEVICES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpuhook.config import Config

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
# Variables that ask for nothing by themselves, but decide on what a container gets that asks.
SETTINGS = (*(name for name in DEVICE_VARIABLES if name != VISIBLE_DEVICES), requirements.CUDA)
MARGIN = 20_000_000  # nanoseconds by which a file's time may lag behind the clock


def now() -> int:
    """Return the time, in nanoseconds, that files must bear which are true as of now."""
    return time.time_ns() - MARGIN


def words(config: "Config") -> tuple[str, ...] | None:
    """Return words of which one is in any config.json that asks for a GPU.

    None where there are no such words, because the configuration names something that JSON
    could write in many ways.
    """
    names = environment.items(config.swarm_resource)
    plain = [_plain_part(name) for name in (*names, *config.cdi_annotation_prefixes)]
    if not all(plain):
        return None
    fixed = (VISIBLE_DEVICES, requirements.CUDA_VERSION, mount_requests.ROOT.rpartition("/")[2])
    return (*fixed, *plain, *ESCAPES)


def _plain_part(text: str) -> str:
    """Return the longest part of a text whose letters JSON escapes by their numbers alone."""
    parts = "".join(char if char in _PLAIN else " " for char in text).split(" ")
    return max(parts, key=len)


def leave(config: "Config", as_of: int) -> None:
    """Write what the launcher needs; failing to costs time alone.

    ``as_of`` is what ``now`` returned before the configuration was read.
    """
    folder = folder_of(config)
    if folder is None:
        return
    contents = {"runtimes": "".join(runtime + ":" for runtime in config.runtimes) + "\n"}
    root = config.driver_root.rstrip("/")
    if PATH_CHARACTERS.issuperset(root):
        contents["machine"] = f"{root}\n"
    found = words(config)
    if found is not None:
        contents["words"] = "\n".join(found) + "\n"
        contents["settings"] = "\n".join(SETTINGS) + "\n"
    try:
        for name, content in contents.items():
            write(folder, name, content, as_of)
        if config.path is not None:  # and of the configuration's own time, a file of that time
            write(folder, "time", "", os.stat(config.path).st_mtime_ns)
    except OSError:
        return


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


def write(folder: str, name: str, content: str, as_of: int) -> None:
    """Write a file whole or not at all, as of that time; OSError if that fails.

    Root owns /run, so nobody else is in the way.
    """
    _make_folders(folder)
    temporary = f"{folder}/.{name}.{os.getpid()}"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        with open(fd, "wb", buffering=0) as file:
            data = content.encode("ascii")
            if file.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), temporary)
            os.utime(file.fileno(), ns=(as_of, as_of))
        os.rename(temporary, f"{folder}/{name}")
    except OSError:
        os.unlink(temporary)
        raise


def _make_folders(path: str) -> None:
    if os.path.isdir(path):
        return
    old = os.umask(0o022)
    try:
        os.makedirs(path, exist_ok=True)
    finally:
        os.umask(old)

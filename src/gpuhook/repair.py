"""Give running containers back the devices that their cgroups no longer allow.

``systemctl daemon-reload`` and ``docker update`` write a container's device rules anew, and
what only the cgroup knew is lost: "Failed to initialize NVML: Unknown Error". The nodes are
still in the container, so what it was given can be read there and be allowed again.

Only nodes that are *mounted* count. A container may make nodes of its own (mknod), but it
can't mount, so it can't talk its way to another container's GPU.

Not on the hot path: only ``gpuhook repair`` comes here.
"""

import os
import re
import stat
import subprocess
from collections.abc import Collection, Iterable

from gpuhook import cgroup
from gpuhook.containers import Container
from gpuhook.errors import ContainerError
from gpuhook.rootfs import Rootfs

_ENGINES = ("docker", "podman")
_SHORTEST_ID = 4
_UNESCAPE = re.compile(rb"\\([0-7]{3})")  # proc_pid_mountinfo(5) writes blanks so
_TIMEOUT_S = 20


def repair(container: Container, devices: Collection[tuple[int, int]]) -> tuple[str, int]:
    """Allow a container the devices that are mounted in it; return how, and how many.

    ``devices`` are the (major, minor) pairs that count. Raises CgroupError, ContainerError.
    """
    given = mounted_devices(container.pid, devices)
    process = os.open(f"/proc/{container.pid}", os.O_PATH | os.O_CLOEXEC)
    try:
        return cgroup.allow(process, given), len(given)
    finally:
        os.close(process)


def mounted_devices(pid: int, devices: Collection[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return which of the devices have a node mounted in a process' mount namespace."""
    found = set()
    try:
        with open(f"/proc/{pid}/mountinfo", "rb") as file:
            points = [_mount_point(line) for line in file]
        with Rootfs(f"/proc/{pid}/root") as root:
            for point in points:
                status = root.stat(point)
                if status is not None and stat.S_ISCHR(status.st_mode):
                    found.add((os.major(status.st_rdev), os.minor(status.st_rdev)))
    except OSError as error:
        raise ContainerError(
            f"The container of process {pid} can't be looked into: {error.strerror}",
            "Run gpuhook repair as root, on the machine where the container runs",
        ) from None
    return sorted(found.intersection(devices))


def _mount_point(line: bytes) -> str:
    field = line.split(b" ", 5)[4]
    return os.fsdecode(_UNESCAPE.sub(lambda match: bytes([int(match[1], 8)]), field))


def select(names: Iterable[str], running: Collection[Container]) -> list[Container]:
    """Return the containers that the names (ids, their beginnings, engines' names) mean.

    Raises ContainerError for a name that means none of them, or several.
    """
    chosen = []
    for name in names:
        found = _by_id(name, running) or _by_id(_ask_engines(name), running)
        if len(found) != 1:
            what = "means several containers" if found else "is no running container with a GPU"
            raise ContainerError(
                f"{name} {what}",
                "Use an id or name as `gpuhook list` or the engine shows it, or --all",
            )
        chosen += found
    return chosen


def _by_id(name: str, running: Collection[Container]) -> list[Container]:
    exact = [each for each in running if each.name == name]
    if exact or len(name) < _SHORTEST_ID:
        return exact
    return [each for each in running if each.name.startswith(name)]


def _ask_engines(name: str) -> str:
    """Return the id of the container that an engine calls by that name, "" if none does."""
    for engine in _ENGINES:
        argv = [engine, "container", "inspect", "--format", "{{.Id}}", "--", name]
        try:
            done = subprocess.run(
                argv, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
            )
        except (OSError, subprocess.SubprocessError):
            continue
        return done.stdout.strip()
    return ""

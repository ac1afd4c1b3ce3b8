"""What root's own config.json allows a running container that has no record.

Low-level runtimes keep a file about each container for root alone, which names its first
process, when that began, and its bundle. Sources: runc's libcontainer/container_linux.go
(state.json), crun's src/libcrun/status.c (status).
"""

import contextlib
import glob
import json
import os
import stat
from collections.abc import Iterable, Iterator
from typing import Any

from gpuhook.ground.cgroup import access
from gpuhook.ground.errors import SpecError
from gpuhook.ground.host import files as host_files
from gpuhook.ground.oci.spec import read_spec
from gpuhook.tools.host import processes
from gpuhook.tools.running import names

_STATE_FILES = (
    "/run/runc/*/state.json",
    "/run/containerd/runc/*/*/state.json",
    "/run/docker/runtime-*/*/*/state.json",
    "/run/crun/*/status",
)
_SHIM = "containerd-shim-runc-v2"
_LIMIT = 16 << 20  # bytes of a state file, which holds all of a config.json
_NAME = 4096  # bytes of a program's path


def allowed_devices(
    pid: int, started: int, devices: Iterable[tuple[int, int]]
) -> list[tuple[int, int]] | None:
    """Return which of the devices a container's config.json allows; None where it isn't found.

    ``pid`` and ``started`` (ticks since the machine did) are of its first process.
    """
    for bundle in _bundles(pid, started):
        try:
            rules = read_spec(os.path.join(bundle, "config.json")).device_rules
        except SpecError:
            continue
        # protects: spec-allows
        return sorted(access.allowed(rules, devices))
    return None


def find(container: str) -> str:
    """Return the bundle of a running container by its id, "" where it isn't found.

    containerd starts its shims in the bundle of the first container that they look after; those
    of the others are beside it. A conmon is told the bundle.
    """
    for folder in _folders_of_shims():
        if _is_bundle(found := f"{folder}/{container}"):
            return found
    if _is_bundle(found := names.watched().get(container, "")):
        return found
    states = [path for each in _STATE_FILES for path in glob.glob(each)]
    ours = [path for path in states if path.split("/")[-2] == container]
    candidates = [bundle for path in ours for bundle in _bundle_of(_load(path))]
    return next((each for each in candidates if _is_bundle(each)), "")


def beside_shims() -> dict[str, str]:
    """Return the bundles of the containers that containerd's shims look after, by their ids."""
    found: dict[str, str] = {}
    for folder in _folders_of_shims():
        with contextlib.suppress(OSError):
            bundles = {name: f"{folder}/{name}" for name in os.listdir(folder)}
            found.update({name: path for name, path in bundles.items() if _is_bundle(path)})
    return found


def _folders_of_shims() -> list[str]:
    """Return where the bundles are beside each other, a folder for each namespace of containerd."""
    found: dict[str, None] = {}
    for process in processes.running(_SHIM):
        with contextlib.suppress(OSError):
            own = os.readlink(f"/proc/{process.pid}/cwd")
            found[f"{process.root}{os.path.dirname(own)}"] = None
    return [*found]


def runtime(container: str, bundle: str) -> str:
    """Return the low-level runtime that an engine calls for a container, "" where nothing says it.

    ``bundle`` is its bundle. containerd's shim writes it down there, Docker's too, and nothing for
    runc, its own choice (cmd/containerd-shim-runc-v2/process, WriteRuntime); a conmon is told.
    """
    for process in processes.running("conmon"):
        if process.option("-c", "--cid")[-1:] == [container]:
            return (process.option("-r", "--runtime") or [""])[0]  # then what it calls at the end
    try:
        return host_files.read(f"{bundle}/runtime", _NAME).decode().strip() or "runc"
    except (OSError, ValueError):
        return ""


def _is_bundle(path: str) -> bool:
    return bool(path) and os.path.isfile(f"{path}/config.json")


def _bundles(pid: int, started: int) -> Iterator[str]:
    """Yield the bundles of the containers whose first process is this one."""
    for pattern in _STATE_FILES:
        for path in glob.glob(pattern):
            state = _load(path)
            runc = state.get("init_process_pid"), state.get("init_process_start")
            crun = state.get("pid"), state.get("process-start-time")
            if (pid, started) in (runc, crun):
                yield from _bundle_of(state)


def _bundle_of(state: dict[str, Any]) -> Iterator[str]:
    if isinstance(state.get("bundle"), str):
        yield state["bundle"]
    config = state.get("config")
    labels = config.get("labels") if isinstance(config, dict) else None
    for label in labels if isinstance(labels, list) else ():
        name, _, value = str(label).partition("=")
        if name == "bundle":
            yield value


def _load(path: str) -> dict[str, Any]:
    """Return a state file that root (or this user) alone can have written, else nothing."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, "rb") as file:
            status = os.fstat(fd)
            trusted = status.st_uid in (0, os.geteuid()) and not status.st_mode & 0o022
            if not trusted or not stat.S_ISREG(status.st_mode):
                return {}
            state = json.loads(file.read(_LIMIT))
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}

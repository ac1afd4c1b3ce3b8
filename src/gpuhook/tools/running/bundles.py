"""Devices that config.json allows a running container without a record.

Low-level runtimes keep a state file for each container, accessible only to root, with its first
process, that process's start time, and the bundle. Sources: runc's
libcontainer/container_linux.go (state.json), crun's src/libcrun/status.c (status).
"""

import contextlib
import glob
import json
import os
import stat
from collections.abc import Iterable, Iterator
from typing import Any

from gpuhook.base.cgroup import access
from gpuhook.base.errors import ContainerError, SpecError
from gpuhook.base.host import files as host_files
from gpuhook.base.host import proc
from gpuhook.base.oci.spec import read_spec
from gpuhook.monitor.containers import groups
from gpuhook.monitor.host import processes
from gpuhook.tools.running import names

_STATE_FILES = (
    "/run/runc/*/state.json",
    "/run/containerd/runc/*/*/state.json",
    "/run/docker/runtime-*/*/*/state.json",
    "/run/crun/*/status",
)
_SHIM = "containerd-shim-runc-v2"
_MAX_BYTES = 16 << 20  # bytes of a state file, which includes the whole config.json
_NAME = 4096  # bytes of a program's path


def allowed_devices(
    pid: int, started: int, devices: Iterable[tuple[int, int]]
) -> list[tuple[int, int]] | None:
    """Return the devices that a container's config.json allows; None if it isn't found.

    ``pid`` and ``started`` (in ticks since boot) identify its first process.
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
    """Return the bundle of a running container by its id, "" if not found.

    containerd starts a shim in the bundle of its first container; those of its other containers
    are in the same parent folder. A conmon gets the bundle as an argument.
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
    """Return the bundles of the containers of containerd's shims, by container id."""
    found: dict[str, str] = {}
    for folder in _folders_of_shims():
        with contextlib.suppress(OSError):
            bundles = {name: f"{folder}/{name}" for name in os.listdir(folder)}
            found.update({name: path for name, path in bundles.items() if _is_bundle(path)})
    return found


def first_processes() -> dict[str, tuple[int, int]]:
    """Return the first process of each running container with a state file, by container id.

    A process is its id and its start time. An id that several containers have is left out.
    """
    found: dict[str, list[tuple[int, int]]] = {}
    for path in [path for each in _STATE_FILES for path in glob.glob(each)]:
        state = _load(path)
        pid = state.get("init_process_pid", state.get("pid"))
        started = state.get("init_process_start", state.get("process-start-time"))
        if isinstance(pid, int) and isinstance(started, int) and started == start_time(pid):
            found.setdefault(path.split("/")[-2], []).append((pid, started))
    return {container: each[0] for container, each in found.items() if len(each) == 1}


def first_process(container: str, bundle: str) -> tuple[int, int]:
    """Return a running container's first process: from its state, or noted by shim or conmon.

    ContainerError if it is unknown, or if such a process' cgroup, as far as root created it, isn't
    named after the container.
    """
    if found := first_processes().get(container):
        return found
    files = [f"{bundle}/init.pid"]
    for process in processes.running("conmon"):
        if process.option("-c", "--cid")[-1:] == [container]:
            noted = process.option("-p", "--container-pidfile")[-1:]
            files += [process.root + name for name in noted]
    for path in files:
        with contextlib.suppress(OSError, ValueError):
            pid = int(host_files.read(path, _NAME))
            started = start_time(pid)
            made = groups.RootCgroups().of(groups.groups_of(pid))
            identity = groups.identify(made, groups.groups_of("self"))
            if started is not None and identity.name == container:  # protects: attach-noted
                return pid, started
    raise ContainerError(
        f"The first process of {container} is unknown",
        "Use a container that an engine of root runs, in a cgroup of its own",
    )


def start_time(pid: int) -> int | None:
    """Return a process's start time in ticks since boot, None if it doesn't run."""
    try:
        return int(proc.stat_fields(proc.read(f"/proc/{pid}/stat"))[19])
    except OSError:
        return None


def _folders_of_shims() -> list[str]:
    """Return the parent folders of bundles, one for each containerd namespace."""
    found: dict[str, None] = {}
    for process in processes.running(_SHIM):
        with contextlib.suppress(OSError):
            own = os.readlink(f"/proc/{process.pid}/cwd")
            found[f"{process.root}{os.path.dirname(own)}"] = None
    return [*found]


def runtime(container: str, bundle: str) -> str:
    """Return the low-level runtime that an engine calls for a container, "" if unknown.

    ``bundle`` is its bundle. The shims of containerd and Docker write the runtime there, but
    nothing for runc, their default (cmd/containerd-shim-runc-v2/process, WriteRuntime). A conmon
    gets it as an argument.
    """
    for process in processes.running("conmon"):
        if process.option("-c", "--cid")[-1:] == [container]:
            return (process.option("-r", "--runtime") or [""])[0]  # the first one is conmon's
    try:
        return host_files.read(f"{bundle}/runtime", _NAME).decode().strip() or "runc"
    except (OSError, ValueError):
        return ""


def _is_bundle(path: str) -> bool:
    return bool(path) and os.path.isfile(f"{path}/config.json")


def _bundles(pid: int, started: int) -> Iterator[str]:
    """Yield the bundles of the containers with the given first process."""
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
    """Return a state file that only root (or this user) can have written, else nothing."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, "rb") as file:
            status = os.fstat(fd)
            trusted = status.st_uid in (0, os.geteuid()) and not status.st_mode & 0o022
            if not trusted or not stat.S_ISREG(status.st_mode):
                return {}
            state = json.loads(file.read(_MAX_BYTES))
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}

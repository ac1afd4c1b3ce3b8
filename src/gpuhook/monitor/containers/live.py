"""Changes of a running container: mounts of nodes and driver files, and denied devices.

Its processes run meanwhile: they may change any path, and mount a filesystem that never answers.
So a child with a deadline does all of it. It reaches every path below a descriptor of the
container's root, and keeps the host's root folder in the container's mount namespace.
"""

import json
import os
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from gpuhook import inject
from gpuhook.base.cgroup import access, v2
from gpuhook.base.cgroup.device_program import allow_rules
from gpuhook.base.config.model import Config
from gpuhook.base.container import entries, kernel
from gpuhook.base.container.changes import ContainerRootfs
from gpuhook.base.errors import CgroupError, ContainerError, GpuhookError, InjectError
from gpuhook.base.fileio import write_all
from gpuhook.core.plan.operations import Operation, Plan
from gpuhook.core.planner import make_plan
from gpuhook.core.records import records
from gpuhook.core.resolve import Allocation
from gpuhook.monitor.containers.cgroup_check import program_allows
from gpuhook.monitor.containers.nodes import Numbers

SECONDS = 30
_ANSWER = 1 << 24  # bytes


class FirstProcess(NamedTuple):
    """A container's first process: its id, and its start time in ticks since boot."""

    pid: int
    started: int


def mount(
    process: FirstProcess, allocation: Allocation, spec: Any, config: Config
) -> dict[str, Any]:
    """Mount what a container was allocated and lacks; all of it, or nothing (InjectError).

    ``spec`` is its config.json. Returns ``operations``, ``undone`` (those for its processes'
    environment and groups) and ``skipped``, as JSON values.
    """

    def work() -> dict[str, Any]:
        with _opened(process) as container:
            found = inject.examine(container, config, allocation.examiners())
            plan = make_plan(allocation.grants, found, allocation.groups)
            lacking = Plan([each for each in plan.operations if not _has(container, each)])
            inject.prepare(lacking)
            _enter(container)
            inject.apply(lacking, container, enter=False)
            mounted = [each for each in lacking.operations if each.destination]
            return {
                "operations": [each.to_json() for each in mounted],
                "undone": [each.describe() for each in inject.left_to_runtime(plan, spec)],
                "skipped": container.skipped,
            }

    return _in_child(work)


def unmount(process: FirstProcess, nodes: Mapping[str, Numbers]) -> list[str]:
    """Unmount nodes, by their paths in the container; return those that were mounted."""

    def work() -> dict[str, Any]:
        with _opened(process) as container:
            _enter(container)
            return {"paths": [path for path in nodes if _unmounted(container, path, nodes[path])]}

    paths: list[str] = _in_child(work)["paths"]
    return paths


def _opened(process: FirstProcess) -> ContainerRootfs:
    """Open the root of a running container; ContainerError if its process is another one."""
    container = inject.open_container(process.pid, "/")
    try:
        if records.started(container.process) == process.started:
            return container
    except OSError:
        pass
    container.close()
    raise ContainerError("The container's first process has exited", "Start the container again")


def _enter(container: ContainerRootfs) -> None:
    """Enter the container's mount namespace, and keep the root folder, with /proc, of the host."""
    root = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    inject.enter(container.process)
    os.fchdir(root)
    os.chroot(".")  # protects: attach-root
    os.close(root)


def _has(container: ContainerRootfs, op: Operation) -> bool:
    """Tell whether a container has the host's file or device at an operation's destination."""
    try:
        ours = os.stat(op.source) if op.source else None
        theirs = container.stat(op.destination) if ours is not None else None
    except OSError:
        return False
    return ours is not None and theirs is not None and entries.same(ours, theirs)


def _unmounted(container: ContainerRootfs, path: str, numbers: Numbers) -> bool:
    """Unmount the node of these numbers, and remove its empty mount point."""
    folder, _, name = path.rpartition("/")
    try:
        fd = container.open(path)
    except OSError:
        return False
    try:
        status = os.fstat(fd)
        found = os.major(status.st_rdev), os.minor(status.st_rdev)
        if not stat.S_ISCHR(status.st_mode) or found != numbers:
            return False
        kernel.detach_mount(fd)
        parent = container.folder(folder)
        left = os.stat(name, dir_fd=parent, follow_symlinks=False)
        if stat.S_ISREG(left.st_mode) and not left.st_size and container.may_write(path):
            entries.remove_same(parent, name, left)
    except OSError:
        pass  # it isn't a mount, or a read-only root filesystem has its mount point
    finally:
        os.close(fd)
    found_now = container.stat(path)
    return found_now is None or not stat.S_ISCHR(found_now.st_mode)


def _in_child(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return a child's result; raise its error, or InjectError if it takes too long."""
    answer = os.memfd_create("answer")
    child = os.fork()
    if child == 0:
        try:
            kernel.die_with_parent()
            kernel.end_after(SECONDS)  # protects: attach-ends
            write_all(answer, json.dumps(_tried(work)).encode())
        finally:
            os._exit(0)
    kernel.reap(child, SECONDS + 1)  # protects: attach-in-time
    try:
        found = json.loads(os.pread(answer, _ANSWER, 0) or b"{}")
    finally:
        os.close(answer)
    if "error" in found:
        raise InjectError(*found["error"])
    if "done" not in found:
        raise InjectError(
            f"The container's files can't be changed: they didn't respond within {SECONDS} seconds",
            "Check which file systems are mounted in the container",
        )
    done: dict[str, Any] = found["done"]
    return done


def _tried(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return {"done": work()}
    except GpuhookError as error:
        return {"error": [error.cause, error.remedy]}
    except OSError as error:
        cause = f"The container's files can't be changed: {error}"
        return {"error": [cause, "Stop the container and start it with the devices"]}


def deny(process: int, devices: Sequence[Numbers], written: Mapping[int, str]) -> bool:
    """Let a container's cgroup deny devices; False if it restricts none. CgroupError.

    ``process`` is a descriptor of /proc/PID, ``written`` as for ``access.allow``.
    """
    version, folder = access.cgroup_of(process, "/proc", written)
    try:
        if version == 1:
            for each in access.way_down(process, folder, written):
                _deny_v1(each, devices)
        places = access.with_policies(folder) if version == 2 else []
        programs = [v2.rewrite(each, lambda old: _denying(old, devices)) for each in places]
    except OSError as error:
        raise CgroupError(
            f"the container's cgroup can't deny its devices: {error}", "Stop the container"
        ) from error
    return version == 1 or any(programs)


def _deny_v1(folder: str, devices: Iterable[Numbers]) -> None:
    fd = os.open(f"{folder}/devices.deny", os.O_WRONLY | os.O_CLOEXEC)
    try:
        for major, minor in devices:
            os.write(fd, f"c {major}:{minor} {access.ACCESS}".encode())
    finally:
        os.close(fd)


def _denying(program: bytes, devices: Sequence[Numbers]) -> bytes:
    """Return a device program without rules that allow devices, or with rules that deny them."""
    changed = program.removeprefix(allow_rules(devices))
    if any(program_allows(changed, *pair) is not False for pair in devices):
        changed = allow_rules(devices, 0) + program
    return changed

"""Apply a plan to a container that is being created: all of it, or none of it.

The order is what makes it safe. Sources are opened below the driver root while still in
the host's mount namespace. The container's root is opened through /proc/PID/root, once.
Then the container's mount namespace is entered and every step is done below that one
descriptor. When a step fails, the journal takes back what was done before it.

Hot path: imports kernel, rootfs, layout and plan.
"""

import os

from gpuhook import cgroup, kernel
from gpuhook.errors import GpuhookError, InjectError
from gpuhook.rootfs import Journal, Rootfs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from gpuhook.operations import Operation
    from gpuhook.plan import Plan


def container_owner(pid: int) -> tuple[int, int]:
    """Return the host's user and group ids of the container's root user.

    Source: user_namespaces(7), /proc/PID/uid_map. OSError if the process is gone.
    """
    return _host_id(f"/proc/{pid}/uid_map"), _host_id(f"/proc/{pid}/gid_map")


def _host_id(path: str) -> int:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        text = os.read(fd, 1 << 16).decode("ascii")
    finally:
        os.close(fd)
    for line in text.splitlines():
        inside, outside, _ = (int(word) for word in line.split())
        if inside == 0:
            return outside
    return 0


def open_container(pid: int, root_path: str, journal: Journal) -> Rootfs:
    """Open a container's root as its own mount namespace has it; InjectError if that fails."""
    try:
        owner = container_owner(pid)
        return Rootfs(f"/proc/{pid}/root{root_path}", journal, owner)
    except OSError as error:
        raise InjectError(
            f"The container's root filesystem {root_path} can't be opened: {error.strerror}",
            "Run gpuhook-prestart as a prestart or createRuntime hook, before the root is pivoted",
        ) from None


def allow_devices(
    pid: int, devices: list[tuple[int, int]], rules: "list[Any]", *, no_cgroups: bool
) -> str:
    """Allow devices in the container's cgroup where the OCI spec's rules don't already.

    Returns how that was done, for the log.
    """
    missing = [pair for pair in devices if not cgroup.spec_allows(rules, *pair)]
    if not missing:
        return "spec"
    if no_cgroups:
        return "no-cgroups"
    return cgroup.allow(pid, missing)


def inject(plan: "Plan", host: Rootfs, container: Rootfs, pid: int, journal: Journal) -> None:
    """Execute a plan's operations; InjectError, and nothing left behind, if one fails.

    This process is in the container's mount namespace afterwards, also after a failure.
    """
    try:
        for operation in plan.operations:
            try:
                operation.prepare(host)
            except OSError as error:
                raise _failed(operation, error) from error
        _enter(pid)
        for operation in plan.operations:
            try:
                operation.execute(container, journal)
            except OSError as error:
                raise _failed(operation, error) from error
    except BaseException as error:
        _take_back(journal, error)
        raise
    finally:
        for operation in plan.operations:
            operation.close()


def _failed(operation: "Operation", error: OSError) -> InjectError:
    return InjectError(
        f"gpuhook couldn't {operation.describe()}: {error.strerror}",
        _remedy(error),
    )


def _remedy(error: OSError) -> str:
    where = f" ({error.filename})" if error.filename else ""
    return f"Check that path{where} in the image and on the host; gpuhook doctor may tell more"


def _enter(pid: int) -> None:
    path = f"/proc/{pid}/ns/mnt"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _refuse_host_namespace(fd)
            kernel.enter_mount_namespace(fd, path)
        finally:
            os.close(fd)
    except OSError as error:
        raise InjectError(
            f"The container's mount namespace can't be entered: {error.strerror}",
            "Run gpuhook-prestart as root, while the container is being created",
        ) from None


def _refuse_host_namespace(fd: int) -> None:
    """Mounts made in a namespace that the container shares would stay on the host."""
    target, ours = os.fstat(fd), os.stat("/proc/self/ns/mnt")
    if (target.st_dev, target.st_ino) == (ours.st_dev, ours.st_ino):
        raise InjectError(
            "The container has no mount namespace of its own",
            "Give it one (linux.namespaces in config.json): GPUs can't be mounted into it",
        )


def _take_back(journal: Journal, error: BaseException) -> None:
    failures = journal.roll_back()
    if failures and isinstance(error, GpuhookError):
        error.remedy += "; left behind, because it couldn't be undone: " + ", ".join(failures)

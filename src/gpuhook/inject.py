"""The hook's work for one container: apply its plan, all of it or none of it.

A hook without a hook worker does everything at once. A hook worker prepares while the low-level
runtime creates the container's process, and does the rest when the hook requests it.

The order makes it safe:

- Sources are opened below the driver root, in the host's mount namespace.
- The container's process and its root are opened once, and all later steps use those descriptors:
  a process id or a path could mean something else a moment later.
- The container's mount namespace is entered, and every step is done below that root.
- If a step fails, the journal rolls back all steps before it.
"""

import errno
import os
import sys
from _frozen_importlib import BuiltinImporter

from gpuhook.base import log, names
from gpuhook.base.cgroup import access
from gpuhook.base.container import kernel
from gpuhook.base.container.changes import ContainerRootfs, Journal
from gpuhook.base.container.rootfs import PATH_FLAGS, RESOLVE, DriverRoots, Rootfs
from gpuhook.base.errors import GpuhookError, InjectError, VolumeError
from gpuhook.base.host import proc
from gpuhook.base.oci.spec import parse_state
from gpuhook.core import contract
from gpuhook.core.plan import image
from gpuhook.core.plan.operations import SetVariable
from gpuhook.core.planner import make_plan
from gpuhook.core.records import records
from gpuhook.core.resolve import find_memory_limits

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any, TypeVar

    from gpuhook.base.config.model import Config
    from gpuhook.base.oci.spec import ContainerState, Spec
    from gpuhook.core.plan.image import Examine, Image
    from gpuhook.core.plan.operations import Operation, Plan
    from gpuhook.core.resolve import Allocation

    Folder = TypeVar("Folder", bound=ContainerRootfs)

_REMEDIES = {
    errno.EROFS: "Give the container a writable root filesystem or layer while it is created",
    errno.ENOSPC: "Free space on the disk that holds the container's layer",
    errno.EDQUOT: "Free space on the disk that holds the container's layer",
    errno.ELOOP: "Remove the links in the {} that lead there in a circle or into /proc",
    errno.ENOTDIR: "Remove the file in the {} that is in the place of a folder there",
    errno.ENOSYS: "Use Linux 5.12 or newer, and a seccomp profile that knows its calls",
    errno.EPERM: "Run the hook as root with CAP_SYS_ADMIN, unhindered by a security module",
    errno.ESRCH: "Look at the runtime's log for why the container ended while it was created",
}


class PreparedPlan:
    """A plan with open sources, prepared before its container exists."""

    def __init__(self, make: "Callable[[Image], Plan]") -> None:
        """Take the function that makes the plan for an image."""
        self._make = make
        self._image: Image | None = None
        self._plan: Plan | None = None

    def begin(self, root_path: str, config: "Config", looks: "Mapping[str, Examine]") -> None:
        """Prepare for the image at ``root_path``, and ignore failures."""
        try:
            with Rootfs(root_path) as root:
                self.for_image(image.examine(root, config, looks))
        except (OSError, GpuhookError):
            return  # for_image does all of it later, and reports what is wrong

    def for_image(self, found: "Image") -> "Plan":
        """Return the prepared plan for an image: the present one if it fits, else a new one."""
        if self._plan is not None:
            if self._image is not None and image.same(self._image, found):
                return self._plan
            close(self._plan)
            self._plan = None
        plan = self._make(found)
        prepare(plan)
        self._plan, self._image = plan, found
        return plan


class Injection:
    """One container's injection; raises the GpuhookError of a failing step."""

    program = names.HOOK

    def __init__(self, spec: "Spec", config: "Config", resolved: "Allocation") -> None:
        """Take the container's config.json and the devices resolved for it."""
        self._spec = spec
        self._config = config
        self._resolved = resolved
        self.memory_limits = find_memory_limits(spec, config, resolved.vendors, resolved)
        steps = self.memory_limits.operations if self.memory_limits is not None else ()
        self._prepared = PreparedPlan(
            lambda found: make_plan(resolved.grants, found, resolved.groups, steps)
        )

    def begin(self) -> None:
        """Prepare for the image in the bundle; ``finish`` checks that it is the same image."""
        if self.memory_limits is not None:
            self.memory_limits.begin()
        self._prepared.begin(self._spec.root_path, self._config, self._resolved.examiners())

    def read_state(self, text: bytes, hook: int) -> "ContainerState":  # noqa: ARG002 - as the CDI hook's
        """Parse the state that a hook received; ``hook`` is its process id."""
        state = parse_state(text)
        if state.bundle != "/":
            return state
        from gpuhook.base.oci import lost_bundle  # noqa: PLC0415 - few containers need it

        return lost_bundle.with_bundle(state, self._spec)

    def finish(self, state: "ContainerState") -> None:
        """Inject into the container of that state, and log it."""
        spec, config = self._spec, self._config
        spec.require_mount_namespace()
        log.warn(names.HOOK, self._resolved.misunderstood(), config)
        with open_container(state.pid, state.root or spec.root_path) as container:
            found = examine(container, config, self._resolved.examiners())
            plan = self._prepared.for_image(found)
            record = self._record(state)
            undone = left_to_runtime(plan, spec.data)
            self._check_without_runtime(undone)
            exclusive = config.exclusive
            with records.RecordWriter(
                config.state_dir, container.process, record, exclusive=exclusive
            ):
                how = allow_devices(
                    container.process, plan.devices, spec.device_rules, no_cgroups=config.no_cgroups
                )
                if self.memory_limits is not None:
                    self.memory_limits.set(
                        container.process, container=container
                    )  # protects: limit-set
                if config.shm_size and self._resolved.gives_devices:
                    from gpuhook.core import resource_limits  # noqa: PLC0415 - only where it is configured

                    resource_limits.resize_shared_memory(container, spec.data, config, self.program)
                apply(plan, container)
        if config.cli_debug:
            facts = {"devices": list(self._resolved.ids), "cgroup": how}
            facts["undone"] = [operation.describe() for operation in undone]
            facts["warnings"] = self._resolved.warnings()
            note(config, state, facts, container)

    def _check_without_runtime(self, undone: "list[Operation]") -> None:
        """Refuse variables that a hook can't set if gpu-py didn't run; RequestError."""
        names = {each.setting.name for each in undone if isinstance(each, SetVariable)}
        for grant in self._resolved.grants if names else ():
            if any(each.name in names for each in grant.vendor.environment(grant)):
                contract.check_others(grant, self._config)  # protects: hook-alone

    def _record(self, state: "ContainerState") -> "dict[str, Any]":
        """Return the container's record."""
        record = self._described(state)
        return (
            record
            if self.memory_limits is None
            else {**record, "limits": self.memory_limits.to_json()}
        )

    def _described(self, state: "ContainerState") -> "dict[str, Any]":
        if not self._config.exclusive:
            annotations = self._spec.data.get("annotations")
            return records.describe(state, annotations, self._resolved.grants)
        from gpuhook.core.records import exclusive_request  # noqa: PLC0415 - few have exclusive devices

        found = self._resolved
        asked = found.grants, found.cdi_devices
        return exclusive_request.describe(state, self._spec, *asked, found.vendors, self._config)


def note(
    config: "Config", state: "ContainerState", facts: "dict[str, Any]", container: ContainerRootfs
) -> None:
    """Log the steps done for a container, and the skipped ones, to the debug log."""
    level = "warning" if container.lacks else "info"
    head = {"level": level, "msg": "injected", "time": log.timestamp()}
    facts = {**facts, "skipped": container.skipped}
    log.append(config.cli_debug, {**head, "container": state.container_id, **facts})


def left_to_runtime(plan: "Plan", spec: "dict[str, Any]") -> "list[Operation]":
    """Return runtime-only operations that config.json lacks because gpu-py didn't run."""
    return [op for op in plan.operations if op.by_runtime and not op.is_in(spec)]


def examine(
    container: ContainerRootfs, config: "Config", looks: "Mapping[str, Examine]"
) -> "Image":
    """Run the vendors' image probes in a container; InjectError if that fails."""
    try:
        return image.examine(container, config, looks)
    except OSError as error:
        holder = container.holder(f"/{error.filename or ''}")
        raise InjectError(
            f"The {holder} can't be examined: {error.strerror} ({error.filename})",
            f"Repair or remove that path in the {holder}",
        ) from None


def container_owner(process: int) -> tuple[int, int]:
    """Return the user and group id in our namespace of root in a process's user namespace.

    ``process`` is a descriptor of /proc/PID. If the process is in our own namespace, its maps refer
    to the parent namespace, as with rootless engines. Source: user_namespaces(7). OSError if the
    process is gone.
    """
    theirs = os.stat("ns/user", dir_fd=process)
    ours = os.stat("/proc/self/ns/user")
    if (theirs.st_dev, theirs.st_ino) == (ours.st_dev, ours.st_ino):
        return 0, 0
    return _host_id(process, "uid_map"), _host_id(process, "gid_map")


def _host_id(process: int, name: str) -> int:
    ids = proc.id_map(proc.read(name, process))
    return next((outside for inside, outside, _ in ids if inside == 0), 0)


def open_container(pid: int, root_path: str) -> ContainerRootfs:
    """Open a container's root in its own mount namespace; InjectError if that fails.

    ``root_path`` is the runtime's path of the root. Links in it are resolved in the container's
    namespace.
    """
    try:
        process = os.open(f"/proc/{pid}", PATH_FLAGS | os.O_DIRECTORY)
        return _open_root(process, root_path, ContainerRootfs, inside=False)
    except OSError as error:
        raise InjectError(
            f"The container's root filesystem {root_path} can't be opened: {error.strerror}",
            "Run gpuhook-prestart as a prestart or createRuntime hook, before the root is pivoted",
        ) from None


def open_inside(root_path: str) -> ContainerRootfs:
    """Open the root of the container in whose mount namespace this process was started.

    The root isn't pivoted yet, so the host's files are visible. ``root_path`` is the runtime's
    path of the root. InjectError if this is the host's own namespace.
    """
    remedy = "Register gpuhook-cdi-hook as `gpuhook cdi generate` does, only as createContainer"
    try:
        process = os.open("/proc/self", PATH_FLAGS | os.O_DIRECTORY)
        container = _open_root(process, root_path, ContainerRootfs, inside=True)
    except OSError as error:
        raise InjectError(
            f"The container's root filesystem {root_path} can't be opened: {error.strerror}", remedy
        ) from None
    if _is_first_namespace() or not container.is_mounted_on():  # protects: first-namespace
        container.close()
        raise InjectError(
            "The container has no mount namespace of its own, or the hook doesn't run in it", remedy
        )
    return container


def open_folder(root_path: str, kind: "type[Folder]") -> "Folder":
    """Open a root folder outside of containers, in this process's own mount namespace.

    Mounts in it stay until they are rolled back or the namespace ends. ``kind`` is the class of
    the returned object. InjectError if that isn't a folder, or is the host's own root.
    """
    try:
        process = os.open("/proc/self", PATH_FLAGS | os.O_DIRECTORY)
        container = _open_root(process, root_path, kind, inside=True)
        container.settle([])
    except OSError as error:
        raise InjectError(
            f"The root folder {root_path} can't be opened: {error.strerror}",
            "Name the folder that holds the root's usr and etc",
        ) from None
    return container


def _open_root(process: int, root_path: str, kind: "type[Folder]", *, inside: bool) -> "Folder":
    """Return the container of a descriptor of /proc/PID, which is closed if that fails."""
    flags = PATH_FLAGS | os.O_DIRECTORY
    root = -1
    try:
        owner = container_owner(process)
        everything = os.open("root", flags, dir_fd=process)
        try:
            below = root_path.lstrip("/") or "."
            root = kernel.openat2(everything, below, flags, RESOLVE)  # protects: root-by-namespace
        finally:
            os.close(everything)
        _refuse_host_root(root, root_path)  # protects: hosts-root
        return kind(root, root_path, Journal(), owner, process, inside=inside)
    except BaseException:
        for fd in (root, process):
            if fd >= 0:
                os.close(fd)
        raise


def _is_first_namespace() -> bool:
    """Tell whether our mount namespace is known to be that of the host's first process.

    In a user namespace, and for an engine that runs in a container itself, that isn't known.
    """
    try:
        first, ours = os.stat("/proc/1/ns/mnt"), os.stat("/proc/self/ns/mnt")
    except OSError:
        return False
    return (first.st_dev, first.st_ino) == (ours.st_dev, ours.st_ino)


def _refuse_host_root(root: int, path: str) -> None:
    ours, theirs = os.stat("/"), os.fstat(root)
    if (ours.st_dev, ours.st_ino) == (theirs.st_dev, theirs.st_ino):
        raise InjectError(
            f"The container's root filesystem {path} is the host's own",
            "Give the container a root filesystem: gpuhook changes nothing on the host",
        )


def allow_devices(
    process: int, devices: list[tuple[int, int]], rules: "list[Any]", *, no_cgroups: bool
) -> str:
    """Allow devices in the container's cgroup, unless the OCI spec's rules allow them already.

    ``process`` is a descriptor of /proc/PID. Returns the method, for the log.
    """
    allowed = access.allowed(rules, devices)
    missing = [pair for pair in devices if pair not in allowed]
    if not missing:
        return "spec"
    if no_cgroups:
        return "no-cgroups"
    return access.allow(process, missing)


def inject(plan: "Plan", container: ContainerRootfs, *, enter: bool = True) -> None:
    """Execute a plan's operations; if one fails, roll all back and raise InjectError.

    This process is in the container's mount namespace afterwards, also after a failure.
    With ``enter`` off, it is there from its start.
    """
    prepare(plan)
    apply(plan, container, enter=enter)


def apply_inside(plan: "Plan", container: ContainerRootfs, *, enter: bool) -> None:
    """Execute a prepared plan as ``apply`` does, in a root that may be read-only already.

    crun makes the root read-only before it calls hooks, runc after that.
    """
    try:
        if enter:
            _enter(container)
        locked = container.is_read_only()
        if locked:
            container.set_read_only(yes=False)
    except OSError as error:
        raise _locked(error) from None
    try:
        apply(plan, container, enter=False)
    finally:
        if locked:
            _lock_again(container)


def _lock_again(container: ContainerRootfs) -> None:
    try:
        container.set_read_only(yes=True)
    except OSError as error:
        raise _locked(error) from None


def _locked(error: OSError) -> InjectError:
    return InjectError(
        f"The container's read-only root can't be made writable for the hook: {error.strerror}",
        _REMEDIES[errno.EROFS],
    )


def prepare(plan: "Plan") -> None:
    """Open a plan's sources in driver roots; if that fails, close all and raise InjectError."""
    try:
        with DriverRoots() as roots:
            for operation in plan.operations:
                try:
                    operation.prepare(roots.of(operation.root))
                except OSError as error:
                    raise _failed(operation, error) from error
    except BaseException:
        close(plan)
        raise


def apply(plan: "Plan", container: ContainerRootfs, *, enter: bool = True) -> None:
    """Execute a prepared plan, all of it or nothing: the second half of ``inject``."""
    try:
        if enter:
            _enter(container)
        for operation in plan.operations:
            _execute(operation, container)
    except BaseException as error:
        _take_back(container.journal, error)
        raise
    finally:
        close(plan)


def _execute(operation: "Operation", container: ContainerRootfs) -> None:
    try:
        operation.execute(container)
    except VolumeError as error:
        if not operation.optional:
            raise
        container.skipped.append(f"{operation.describe()}: {error.cause}")
        if operation.destination:
            container.lacks[operation.destination] = operation.leads_to
    except OSError as error:
        holder = container.holder(operation.destination)
        raise _failed(operation, error, holder) from error


def close(plan: "Plan") -> None:
    """Close what was opened for a plan."""
    for operation in plan.operations:
        operation.close()


def _failed(operation: "Operation", error: OSError, holder: str = "image") -> InjectError:
    where = f" ({error.filename})" if error.filename else ""
    remedy = "Check that path in the {} and on the host; gpuhook doctor may say more"
    return InjectError(
        f"gpuhook couldn't {operation.describe()}: {error.strerror}{where}",
        _REMEDIES.get(error.errno or 0, remedy).format(holder),
    )


def _enter(container: ContainerRootfs) -> None:
    enter(container.process, _import_no_more)  # protects: no-import


def enter(process: int, before: "Callable[[], None]" = lambda: None) -> None:
    """Enter the mount namespace of a descriptor of /proc/PID; call ``before`` just before that.

    Before the root is pivoted, the host's files stay visible. InjectError if that fails.
    """
    try:
        # protects: namespace-by-process
        fd = os.open("ns/mnt", os.O_RDONLY | os.O_CLOEXEC, dir_fd=process)
        try:
            _refuse_host_namespace(fd)
            before()
            kernel.enter_mount_namespace(fd, "ns/mnt")
        finally:
            os.close(fd)
    except OSError as error:
        raise InjectError(
            f"The container's mount namespace can't be entered: {error.strerror}",
            "Run gpuhook-prestart as root, while the container is being created",
        ) from None


def _import_no_more() -> None:
    """Disable imports: from here on, they would load the container's files."""
    sys.meta_path[:] = [BuiltinImporter]


def _refuse_host_namespace(fd: int) -> None:
    """Refuse the host's own mount namespace, where mounts would stay on the host."""
    target, ours = os.fstat(fd), os.stat("/proc/self/ns/mnt")
    if (target.st_dev, target.st_ino) == (ours.st_dev, ours.st_ino):
        raise InjectError(
            "The container has no mount namespace of its own, or the hook runs in it",
            "Register the hook as prestart or createRuntime, not as createContainer, and give "
            "the container a mount namespace of its own (linux.namespaces in config.json)",
        )


def _take_back(journal: Journal, error: BaseException) -> None:
    failures = journal.roll_back()
    if failures and isinstance(error, GpuhookError):
        error.remedy += "; left behind, because it couldn't be rolled back: " + ", ".join(failures)

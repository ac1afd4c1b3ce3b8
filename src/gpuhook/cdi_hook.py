"""gpuhook-cdi-hook, the createContainer hook of gpuhook's CDI specs: does what CDI can't express.

The engine has mounted the driver's files and made the nodes. Everything else depends on the image
and on the combination of devices: links to libraries, the loader's cache, the mask of
/proc/driver, files that name the devices.

The hook starts in the container's namespaces and cgroup, before the root is pivoted.
"""

import os
import sys

from gpuhook import __version__
from gpuhook.base import log, names
from gpuhook.base.config.loader import load
from gpuhook.base.config.model import Config
from gpuhook.base.errors import (
    CdiError,
    GpuhookError,
    InjectError,
    MemoryLimitError,
    StateError,
    shown,
)
from gpuhook.base.oci.spec import ContainerState, hook_name, parse_state, read_spec
from gpuhook.core import contract
from gpuhook.core.cdi import hook_args
from gpuhook.core.resolve import find_memory_limits
from gpuhook.vendors import registry

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import ModuleType
    from typing import NoReturn

    from gpuhook.base.container.changes import ContainerRootfs
    from gpuhook.base.oci.spec import Spec
    from gpuhook.core.contract import Grant, Vendor, VendorRegistry
    from gpuhook.core.inventory.model import Inventory
    from gpuhook.core.memory_limits import MemoryLimits
    from gpuhook.core.plan.image import Examine
    from gpuhook.core.records.records import RecordWriter
    from gpuhook.inject import PreparedPlan

USAGE = f"""usage: {names.CDI_HOOK} [--config FILE] KIND

Reads an OCI container state on standard input and does what a CDI spec of that kind
(nvidia.com/gpu) can't express. The CDI specs that `gpuhook cdi generate` writes name it.

       {names.CDI_HOOK} {names.MEMORY_LIMITS_VERB} [--driver-root DIR] [--gpu-id UUID ...]

Limits the memory of the container's GPUs, as a createRuntime hook: NVIDIA's toolkit calls
its nvidia-cdi-hook in this way.
"""
_MEMORY_LIMITS_OPTIONS = ("driver-root", "gpu-id")
_MAX_STATE = 16 << 20


def main(argv: list[str]) -> "NoReturn":
    """Run the hook with its arguments; exit with 0, 1 or 2."""
    if "-h" in argv or "--help" in argv:
        sys.stdout.write(USAGE)
        sys.exit(0)
    if argv[:1] in (["-v"], ["--version"]):
        sys.stdout.write(f"{names.CDI_HOOK} {__version__}\n")
        sys.exit(0)
    config = Config()
    words = [word for word in argv if word != names.HELPER_KILLED]
    try:
        if words[:1] == [names.MEMORY_LIMITS_VERB]:
            ids = gpu_ids(words[1:])
            state = sys.stdin.buffer.read(_MAX_STATE)
            config = load(None)
            set_memory_limits(state, config, ids)
            os._exit(0)
        config_path, kind = read_arguments(words)
        state = sys.stdin.buffer.read(_MAX_STATE)
        config = load(config_path)
        if names.HELPER_KILLED in argv:
            raise InjectError("The helper was killed", "Start the container again")
        run(state, config, _vendor_of(kind, config))
    except GpuhookError as error:
        log.error(names.CDI_HOOK, str(error), config)
        sys.exit(1)
    os._exit(0)  # nothing is buffered, and finalizing the interpreter takes 2 ms


def read_arguments(argv: list[str]) -> tuple[str | None, str]:
    """Return the configuration file (None: not given) and the kind; else print usage and exit 2.

    CdiError for a verb: a CDI spec calls the hook of another toolkit, whose path leads to ours.
    """
    path = None
    words = list(argv)
    if words[:1] == ["--config"] and len(words) > 1:
        path = words[1]
        words = words[2:]
    if words and "/" not in words[0] and not words[0].startswith("-"):
        raise CdiError(
            f"Another toolkit's CDI spec calls its hook with {shown(words[0])}, "
            f"and {names.CDI_HOOK} works only for CDI specs of gpuhook",
            "Make the CDI spec again with `gpuhook cdi generate`, and delete the other one",
        )
    if len(words) != 1 or words[0].startswith("-") or path == "":
        sys.stderr.write(USAGE)
        sys.exit(2)
    return path, words[0]


def gpu_ids(argv: list[str]) -> list[str]:
    """Return the UUIDs in MEMORY_LIMITS_VERB's arguments; others print the usage and exit."""
    given: dict[str, list[str]] = {name: [] for name in _MEMORY_LIMITS_OPTIONS}
    words = list(argv)
    while words:
        name, equals, value = words.pop(0).partition("=")
        if name.lstrip("-") not in given or not name.startswith("-") or not (equals or words):
            sys.stderr.write(USAGE)
            sys.exit(2)
        given[name.lstrip("-")].append(value if equals else words.pop(0))
    return given["gpu-id"]


def set_memory_limits(state_text: bytes, config: Config, ids: "Sequence[str]") -> None:
    """Limit the memory of a container's devices, which an engine gives it; MemoryLimitError.

    ``ids`` are GPUs that the caller names, which must be among the container's devices. All its
    devices are limited in one call: NVIDIA's specs have a call for each.
    """
    state = parse_state(state_text)
    spec = read_spec(os.path.join(state.bundle, "config.json"))
    found = _memory_limits(spec, config, ())
    if found is None:
        return
    limited = {operation.id for operation in found.operations}
    others = [name for name in ids if name not in limited]
    if others:  # protects: limit-named-gpu
        raise MemoryLimitError(
            f"The memory of GPU {shown(others[0])} is to be limited, which isn't one of the "
            "container's devices",
            "Make the CDI spec again",
        )
    from gpuhook.core.records import exclusive_request  # noqa: PLC0415 - as above
    from gpuhook.inject import open_container  # noqa: PLC0415 - only for this verb

    with open_container(state.pid, state.root or spec.root_path) as container:
        exclusive_request.take(
            container, state, spec, None, registry.all_vendors(config), config, found
        )


def _vendor_of(kind: str, config: Config) -> "ModuleType":
    found = _known_kind(kind, registry.all_vendors(config))
    if found is None:
        raise _unknown_kind(kind)
    return found


def _unknown_kind(kind: str) -> CdiError:
    return CdiError(
        f"gpuhook doesn't know devices of the kind {shown(kind)}",
        "Make the CDI spec again with `gpuhook cdi generate`",
    )


def _known_kind(kind: str, vendors: "VendorRegistry") -> "ModuleType | None":
    return next((each for each in vendors.values() if kind == each.KIND), None)


def run(state_text: bytes, config: Config, vendor_names: "ModuleType") -> None:
    """Complete the container of this state, or leave it unchanged if that fails."""
    state = parse_state(state_text, needs_pid=False)
    spec = read_spec(os.path.join(state.bundle, "config.json"))
    if _says_all(spec):
        spec.require_mount_namespace()
    vendor = contract.load(vendor_names)
    import_hook_modules(vendor)
    from gpuhook.core.inventory import cache  # noqa: PLC0415 - imported already, as what follows
    from gpuhook.core.records import records  # noqa: PLC0415

    # In the container's cgroup, a driver shows only the container's devices, so this isn't saved.
    inventory = cache.get_inventory(config, vendor, save=False)  # protects: cdi-saves-nothing
    pid, process = records.first_process()
    try:
        state = ContainerState(state.container_id, pid, state.bundle, state.root)
        _work_inside(state, spec, config, vendor, inventory, process)
    finally:
        if process >= 0:
            os.close(process)


def _says_all(spec: "Spec") -> bool:
    """Tell whether a config.json describes the whole container: Apptainer's has only the root."""
    return "linux" in spec.data


def _work_inside(
    state: ContainerState,
    spec: "Spec",
    config: Config,
    vendor: "Vendor",
    inventory: "Inventory",
    process: int,
    report: "Callable[[DocumentInjection], None]" = lambda _: None,
) -> None:
    """Do the work in the container's mount namespace, where this runs.

    ``process`` is the container's first process.
    """
    from gpuhook import inject  # noqa: PLC0415 - imported already

    with inject.open_inside(state.root or spec.root_path) as container:
        seen = None if _says_all(spec) else container
        injection = DocumentInjection(spec, config, vendor, inventory, seen)
        report(injection)
        injection.apply(state, container, process, enter=False)


def serve(
    state_text: bytes,
    hook: int,
    config: Config,
    vendor: "Vendor",
    inventory: "Inventory",
    report: "Callable[[DocumentInjection], None]",
) -> None:
    """Do the work for a hook, from the host's mount namespace; ``hook`` is its process id.

    ``report`` is called with the injection before it is done.
    """
    state, process = _of_hook(state_text, hook)
    try:
        spec = read_spec(os.path.join(state.bundle, "config.json"))
        if _says_all(spec):
            injection = DocumentInjection(spec, config, vendor, inventory)
            report(injection)
            injection.finish(state)
            return
        from gpuhook import inject  # noqa: PLC0415 - imported already

        inject.enter(process)
        _work_inside(state, spec, config, vendor, inventory, process, report)
    finally:
        os.close(process)


def _of_hook(text: bytes, hook: int) -> tuple[ContainerState, int]:
    """Parse the state that a hook received, with the process that started the hook as the pid.

    ``hook`` is the hook's process id. The caller closes the descriptor of that process's /proc/PID.
    StateError if that process isn't in the container.
    """
    from gpuhook.core.records import records  # noqa: PLC0415 - imported already

    state = parse_state(text, needs_pid=False)
    pid, process = records.first_process(f"/proc/{hook}")
    if process < 0:
        raise StateError(
            "The process that called the hook isn't in the container's mount namespace",
            "Start the container again; if that doesn't help, set helper = false",
        )
    return ContainerState(state.container_id, pid, state.bundle, state.root), process


def of_kind(
    kind: str,
    spec: "Spec",
    config: Config,
    vendors: "VendorRegistry",
    inventories: "Mapping[str, Inventory]",
) -> "DocumentInjection":
    """Return the work for a container that has devices of a CDI spec of that kind.

    ``inventories``, by vendor, are known to be the host's. GpuhookError if there is none.
    """
    vendor_names = _known_kind(kind, vendors)
    if vendor_names is None:
        raise _unknown_kind(kind)
    vendor = contract.load(vendor_names)
    import_hook_modules(vendor)
    from gpuhook.core.inventory import cache  # noqa: PLC0415 - imported already

    inventory = inventories.get(vendor_names.NAME) or cache.get_inventory(config, vendor)
    return DocumentInjection(spec, config, vendor, inventory)


def import_hook_modules(vendor: "Vendor") -> None:
    """Import all modules for injecting a vendor's devices, before accessing the container."""
    vendor.import_hook_modules()
    from gpuhook import inject  # noqa: F401, PLC0415 - slow, and not for every call
    from gpuhook.core import spec_devices  # noqa: F401, PLC0415
    from gpuhook.core.cdi import hook  # noqa: F401, PLC0415
    from gpuhook.core.inventory import cache  # noqa: F401, PLC0415
    from gpuhook.core.records import records  # noqa: F401, PLC0415


def _memory_limits(spec: "Spec", config: Config, given: "Sequence[Grant]") -> "MemoryLimits | None":
    """Return the limits to set, None if there are none or gpu-py's own hook sets them.

    ``given`` are the container's grants that its config.json doesn't show.
    """
    ours = [hook for stage in names.HOOK_STAGES for hook in spec.hooks(stage)]
    if any(hook_name(hook) == names.HOOK for hook in ours):
        return None
    return find_memory_limits(spec, config, registry.all_vendors(config), None, given=given)


class DocumentInjection:
    """The work of the CDI hook for one container; raises the GpuhookError of a failing step.

    It has the interface of ``inject.Injection``, for a hook worker; this program does all at once.
    """

    program = names.CDI_HOOK

    def __init__(
        self,
        spec: "Spec",
        config: Config,
        vendor: "Vendor",
        inventory: "Inventory",
        seen: "ContainerRootfs | None" = None,
    ) -> None:
        """Take the container's config.json and the host's inventory of the vendor.

        With ``seen``, mounts are read from the container, because its config.json doesn't list
        them: Apptainer's has only the root.
        """
        from gpuhook.core import spec_devices  # noqa: PLC0415 - imported already, as what follows
        from gpuhook.core.cdi import hook  # noqa: PLC0415

        self._spec = spec
        self._config = config
        self._vendor = vendor
        given = spec.data
        numbers_at = hook.by_mounts(given, os.path.dirname(spec.path))
        if seen is not None:
            given = {**given, "mounts": [{"destination": path} for path in seen.mounted()]}
            numbers_at = lambda path: spec_devices.numbers_of(seen.stat(path))  # noqa: E731
        mounts = hook_args.mounts_of(spec, vendor.names.KIND)
        self._work = hook.HookWork(given, mounts, vendor, inventory, config, numbers_at)
        contract.check_others(self._work.grant, config)
        self._prepared: PreparedPlan | None = None
        more = () if seen is None else (self._work.grant,)  # protects: limit-by-mounts
        self.memory_limits = _memory_limits(spec, config, more)

    @property
    def _examiners(self) -> "dict[str, Examine]":
        return {self._vendor.names.NAME: self._vendor.examine}

    def begin(self) -> None:
        """Prepare for the image in the bundle; ``finish`` checks that it is the same image."""
        from gpuhook import inject  # noqa: PLC0415 - imported already

        self._prepared = inject.PreparedPlan(self._work.plan)
        if self.memory_limits is not None:
            self.memory_limits.begin()
        self._prepared.begin(self._spec.root_path, self._config, self._examiners)

    def read_state(self, text: bytes, hook: int) -> ContainerState:
        """Parse the state that a hook received; ``hook`` is its process id."""
        state, process = _of_hook(text, hook)
        os.close(process)
        return state

    def finish(self, state: ContainerState) -> None:
        """Do the work for the container of that state, from the host's mount namespace."""
        from gpuhook import inject  # noqa: PLC0415 - imported already

        self._spec.require_mount_namespace()
        with inject.open_container(state.pid, state.root or self._spec.root_path) as container:
            self.apply(state, container, container.process, enter=True)

    def apply(
        self, state: ContainerState, container: "ContainerRootfs", process: int, *, enter: bool
    ) -> None:
        """Do the work in an open container; ``process`` is its first process's /proc/PID."""
        from gpuhook import inject  # noqa: PLC0415 - imported already

        found = inject.examine(container, self._config, self._examiners)
        plan = (self._prepared or inject.PreparedPlan(self._work.plan)).for_image(found)
        with self._record(state, process):
            if self.memory_limits is not None:
                self.memory_limits.set(process, container=container)
            if self._config.shm_size and self._work.grant.devices:
                from gpuhook.core import resource_limits  # noqa: PLC0415 - only where it is configured

                resource_limits.resize_shared_memory(
                    container, self._spec.data, self._config, self.program
                )
            inject.apply_inside(plan, container, enter=enter)
        if self._config.cli_debug:
            facts = {"devices": list(self._work.grant.ids), "cgroup": "cdi"}
            inject.note(self._config, state, facts, container)

    def _record(self, state: ContainerState, process: int) -> "RecordWriter":
        """Return a context manager that records the container's devices."""
        from gpuhook.core.records import records  # noqa: PLC0415 - imported already

        config, grants = self._config, [self._work.grant]
        if config.exclusive:
            from gpuhook.core.records import exclusive_request  # noqa: PLC0415 - few have exclusive devices

            vendors = registry.all_vendors(config)
            record = exclusive_request.describe(
                state, self._spec, grants, (), vendors, config, save=False
            )
        else:
            record = records.describe(state, self._spec.data.get("annotations"), grants)
        self._work.recorded(record["given"][0])
        if self.memory_limits is not None:
            record["limits"] = self.memory_limits.to_json()
        exclusive = config.exclusive
        return records.RecordWriter(
            config.state_dir, process, record, add=True, exclusive=exclusive
        )

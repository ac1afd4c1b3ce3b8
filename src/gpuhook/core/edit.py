"""The edit of config.json for the devices that a container is granted.

Its callers are gpu-py, podman's precreate hook, and the workers of the prefork server.
"""

import os

from gpuhook.base import log, names
from gpuhook.base.errors import MemoryLimitError, RuntimeMissingError, SpecError
from gpuhook.base.oci.jsontext import Record
from gpuhook.base.oci.spec import hook_name
from gpuhook.core.resolve import find_memory_limits, resolve, sets_memory_limit

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from gpuhook.base.config.model import Config
    from gpuhook.base.oci.spec import Spec
    from gpuhook.core.cdi.parse_cache import Documents
    from gpuhook.core.contract import VendorRegistry
    from gpuhook.core.inventory.model import Inventory
    from gpuhook.core.resolve import Allocation

# Arguments of our hook that only gpu-py writes.
_OF_GPU_PY = (names.HELPER_OPTION, names.BUNDLE_OPTION, names.LEASE_VERB)


class HookTask(Record):
    """A hook worker's task: the work of a container's hook.

    ``kind`` is that of the CDI spec with the hook, "" for gpuhook-prestart.
    """

    spec: "Spec"
    resolved: "Allocation"
    kind: str


class EditResult:
    """An edited spec, and the task that a hook worker of it would have, if any."""

    def __init__(
        self,
        spec: "Spec",
        config: "Config",
        folder: str,
        task: HookTask | None = None,
        place: int = 0,
    ) -> None:
        """Take a spec without its hook's arguments; ``place`` is a CDI spec hook's index."""
        self.task = task
        self._spec = spec
        self._config = config
        self._folder = folder
        self._place = place

    def finish(self, words: "Sequence[str]" = ()) -> "Spec":
        """Return the final spec; ``words``, if any, lead its hook to a worker."""
        words = [names.HELPER_OPTION, *words] if words else []
        if self.task is None or (self.task.kind and not words):
            return self._spec
        if not self.task.kind:
            return add_hook(self._spec, self._config, self._folder, words)
        from gpuhook.core.cdi import worker_mounts  # noqa: PLC0415 - loaded with the task

        return worker_mounts.with_words(self._spec, self._place, words)


def edit(
    spec: "Spec",
    config: "Config",
    vendors: "VendorRegistry",
    folder: str,
    *,
    has_worker: bool = False,
    inventories: "Mapping[str, Inventory] | None" = None,
    documents: "Documents | None" = None,
    container: str = "",
    starter: int | None = None,
) -> EditResult | None:
    """Return a spec edited for its devices; None if it gets none.

    ``vendors`` are all vendors. ``folder`` contains gpuhook-prestart. ``has_worker`` says whether a
    worker may do the work of a CDI spec's hook; gpuhook-prestart's task doesn't depend on it.
    ``inventories``, by vendor, are known to match the host; ``documents`` are CDI specs that were
    read before. ``container`` is the container's id, "" if unknown. ``starter`` is the process that
    is, or becomes, the low-level runtime: free devices are chosen for it.
    """
    resolved = resolve(
        spec.data, config, vendors,
        container=container, inventories=inventories, starter=starter, path=spec.path,
    )  # fmt: skip
    if resolved is None or not (resolved.grants or resolved.cdi_devices):
        return _edit_without_devices(spec, resolved, config, vendors, folder, inventories)
    spec.require_mount_namespace()
    if resolved.start is not None and resolved.start.former:
        spec = _without_nodes(spec, resolved.start.former)
    edited, task, place = _apply_documents(
        spec, resolved, config, documents, folder, has_worker=has_worker
    )
    edited = _edit_process(edited, resolved)
    if config.raises_resource_limits and resolved.gives_devices:
        from gpuhook.core import resource_limits  # noqa: PLC0415 - only where it is configured

        edited = resource_limits.apply(edited, config)
    way = "cdi"
    if resolved.grants:
        from gpuhook.core.request import reader  # noqa: PLC0415 - only where a GPU is asked for

        way = reader.effective_mode(config.mode, resolved.requests)
        if way == "spec":
            edited = _edit_spec(edited, resolved, config)
        else:
            edited = _edit_for_hook(edited, resolved)
            task = HookTask(edited, resolved, "")
            if has_hook(edited):  # protects: second-hook
                task = None
    edited = _take(edited, resolved, config, vendors, folder, way, inventories)
    log.edited(spec.path, way, (*resolved.ids, *resolved.cdi_devices), config)
    return EditResult(edited, config, folder, task, place)


def _edit_without_devices(
    spec: "Spec",
    resolved: "Allocation | None",
    config: "Config",
    vendors: "VendorRegistry",
    folder: str,
    inventories: "Mapping[str, Inventory] | None",
) -> EditResult | None:
    """Return the edited spec of a container that requests no devices, None if it is unchanged.

    It may have devices all the same: engines apply CDI specs themselves.
    """
    if resolved is not None:
        log.without(spec.path, resolved.absent, config)
    # protects: engines-lease
    edited = _take(spec, resolved, config, vendors, folder, "", inventories)
    if config.raises_resource_limits:
        from gpuhook.core import resource_limits  # noqa: PLC0415 - only where it is configured

        edited = (
            resource_limits.apply(edited, config)
            if resource_limits.has_devices(spec, vendors)
            else edited
        )
    return None if edited is spec else EditResult(edited, config, folder)


def _take(
    spec: "Spec",
    resolved: "Allocation | None",
    config: "Config",
    vendors: "VendorRegistry",
    folder: str,
    way: str,
    inventories: "Mapping[str, Inventory] | None",
) -> "Spec":
    """Return the spec with a hook for exclusive devices and memory limits, if it needs one.

    Raises as ``_needs_hook``. In mode ``hook``, the injecting hook does this as well.
    """
    needed = _needs_hook(spec, resolved, config, vendors, inventories) or _lacks_record(
        spec, resolved
    )
    if not needed or way == "hook":
        return spec
    return add_hook(without_old_hooks(spec), config, folder, verb=names.LEASE_VERB)


def _lacks_record(spec: "Spec", resolved: "Allocation | None") -> bool:
    """Tell whether chosen devices need a record, and no hook of a CDI spec writes one."""
    if resolved is None or not resolved.chosen:
        return False
    hooks = [hook for stage in names.HOOK_STAGES for hook in spec.hooks(stage)]
    return all(hook_name(hook) != names.CDI_HOOK for hook in hooks)


def check_restored(spec: "Spec", config: "Config", vendors: "VendorRegistry") -> None:
    """Refuse to restore a container with limited, shared or exclusive devices from a checkpoint.

    Nothing is edited for such a container, so no hook of ours runs before its program continues.
    Raises MemoryLimitError, or the error of a start that would be refused as well. The gate has no
    verdict on such a container.
    """
    gated = config.gate  # protects: restored-gate
    ruled = gated or config.exclusive or config.mps_devices or config.limits_memory
    if not (ruled or sets_memory_limit(spec.data, vendors)):
        return
    resolved = resolve(spec.data, config, vendors, starter=0)
    grants = resolved.grants if resolved is not None else ()
    # protects: restored-shared
    shared = any(grant.vendor.only_by_runtime(grant, config) for grant in grants)
    if _needs_hook(spec, resolved, config, vendors) or shared:  # protects: restored-limits
        raise MemoryLimitError(
            "The container has devices that are limited, shared or exclusive, which gpuhook can "
            "enforce when a container is created, but not when one is restored from a checkpoint",
            "Start it again instead",
        )


def check_other_config(spec: "Spec", config: "Config", vendors: "VendorRegistry") -> None:
    """Refuse a container with devices whose config.json isn't its bundle's (crun's --config).

    Hooks only receive the bundle, and would read another config.json. Raises SpecError, or the
    error of a start that would be refused as well.
    """
    resolved = resolve(spec.data, config, vendors, starter=0)
    asks = resolved is not None and (resolved.grants or resolved.cdi_devices)
    # protects: other-config
    if asks or _needs_hook(spec, resolved, config, vendors):
        raise SpecError(
            f"The container requests devices in {spec.path}, which isn't its bundle's config.json "
            "(--config), and hooks find no other",
            "Start it without --config, from a bundle with that file as its config.json",
        )


def _needs_hook(
    spec: "Spec",
    resolved: "Allocation | None",
    config: "Config",
    vendors: "VendorRegistry",
    inventories: "Mapping[str, Inventory] | None" = None,
) -> bool:
    """Return whether devices of the container are limited or exclusive.

    HeldError if another container uses an exclusive one now, MemoryLimitError for an impossible
    limit, RequestError for a device that the engine adds and that only gpuhook may add.
    """
    needed = find_memory_limits(spec, config, vendors, resolved, inventories) is not None
    if config.exclusive:
        from gpuhook.core.records import exclusive_request  # noqa: PLC0415 - rarely configured

        needed = exclusive_request.check(spec, resolved, vendors, config) or needed
    return needed


def _apply_documents(
    spec: "Spec",
    resolved: "Allocation",
    config: "Config",
    documents: "Documents | None",
    folder: str,
    *,
    has_worker: bool,
) -> "tuple[Spec, HookTask | None, int]":
    """Return the spec with the edits of CDI specs, a hook worker's task, and its hook's index.

    A container has one worker. If gpuhook-prestart also injects devices, the worker is for that
    hook, and no task is returned here.
    """
    if not resolved.cdi_devices:
        return spec, None, 0
    from gpuhook.core.cdi import apply, hook_args, parse_cache  # noqa: PLC0415 - only for CDI specs

    found = parse_cache.read_folders(config, documents)
    edits = apply.resolve(found, resolved.cdi_devices)
    apply.check_writers(found, resolved.cdi_devices)
    spec = hook_args.without_words(spec)
    if not has_worker or resolved.grants:
        return apply.apply_to_spec(spec, edits), None, 0
    from gpuhook.core.cdi import worker_mounts  # noqa: PLC0415 - only with a worker

    edited, place, kind = worker_mounts.apply_to_spec(
        spec, edits, resolved.cdi_devices, resolved.vendors, config, folder
    )
    return edited, HookTask(edited, resolved, kind) if kind else None, place


def _without_nodes(spec: "Spec", numbers: "set[tuple[int, int]]") -> "Spec":
    """Return the spec without these device nodes, and the rules that allow them."""
    linux = spec.data["linux"]
    found: dict[tuple[str, ...], Any] = {("linux", "devices"): linux.get("devices")}
    if spec.device_rules:
        found["linux", "resources", "devices"] = spec.device_rules
    return spec.put(
        {
            path: [each for each in items if not _is_node(each, numbers)]
            for path, items in found.items()
            if isinstance(items, list)
        }
    )


def _is_node(entry: object, numbers: "set[tuple[int, int]]") -> bool:
    """Tell whether a node or a rule of config.json is of one of these character devices."""
    if not isinstance(entry, dict) or entry.get("type") != "c" or entry.get("allow") is False:
        return False
    return (entry.get("major"), entry.get("minor")) in numbers


def _edit_process(spec: "Spec", resolved: "Allocation") -> "Spec":
    """Return the spec with the variables and groups that its process needs."""
    if not resolved.settings and not resolved.groups:
        return spec
    from gpuhook.base.oci import process  # noqa: PLC0415 - few vendors need it

    for each in resolved.settings:
        spec = process.set_variable(spec, each)
    return process.add_groups(spec, resolved.groups)


def _edit_for_hook(spec: "Spec", resolved: "Allocation") -> "Spec":
    """Return the spec with the device rules, and without the hooks that ours replaces."""
    devices = dict.fromkeys(pair for grant in resolved.grants for pair in grant.rules())
    _link_nodes(spec, resolved)
    return _add_device_rules(without_old_hooks(spec), list(devices))


def _link_nodes(spec: "Spec", resolved: "Allocation") -> None:
    """Link the allowed devices for systemd, if it manages the container's cgroup."""
    if spec.is_in_scope:
        from gpuhook.core import dev_char  # noqa: PLC0415 - only with systemd's cgroups

        for grant in resolved.grants:
            allowed = grant.rules()
            nodes = grant.inventory.nodes
            granted = (node for node in nodes if node.numbers in allowed)
            dev_char.make_links(granted, grant.inventory.root)


def _edit_spec(spec: "Spec", resolved: "Allocation", config: "Config") -> "Spec":
    """Return the spec edited for mode spec, for the root filesystem that the engine prepared."""
    from gpuhook.base.container.rootfs import Rootfs  # noqa: PLC0415
    from gpuhook.core.plan import image, spec_edits  # noqa: PLC0415 - only in mode spec
    from gpuhook.core.plan.operations import Plan, usable  # noqa: PLC0415
    from gpuhook.core.planner import make_plan  # noqa: PLC0415

    log.warn(names.RUNTIME, resolved.misunderstood(), config)
    try:
        with Rootfs(spec.root_path) as root:
            found = image.examine(root, config, resolved.examiners())
            operations = make_plan(resolved.grants, found, resolved.groups).operations
            plan = Plan(usable(operations)[0])
            done = spec_edits.written(spec, plan, root)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not a path"
        raise SpecError(
            f"The root filesystem {spec.root_path} can't be opened: {why}",
            "Mount it before the runtime is called, or use mode hook",
        ) from None
    for stage in names.HOOK_STAGES:  # their work is done
        spec = spec.drop_hooks(stage, (*names.TOOLKIT_HOOKS, names.HOOK))
    if done.left_out:
        log.left_out(spec.path, done.left_out, config)
    return spec_edits.apply(_add_device_rules(spec, plan.devices), done)


def _add_device_rules(spec: "Spec", devices: list[tuple[int, int]]) -> "Spec":
    from gpuhook.base.cgroup import access  # noqa: PLC0415 - only where a GPU is asked for

    allowed = access.allowed(spec.device_rules, devices)
    missing = [pair for pair in devices if pair not in allowed]
    if not missing:
        return spec
    return spec.append(("linux", "resources", "devices"), access.device_rules(missing))


def without_old_hooks(spec: "Spec") -> "Spec":
    """Return a spec without the hooks that ours replaces.

    These are NVIDIA's hooks, which Docker's --gpus adds, and our own hook of an earlier start. That
    one leads to a worker that has ended, names the earlier bundle, or only takes a lease.
    """
    for stage in names.HOOK_STAGES:
        spec = spec.drop_hooks(stage, names.TOOLKIT_HOOKS)
        for hook in spec.hooks(stage):
            args = hook.get("args")
            words = args if isinstance(args, list) else ()
            ours = any(word in words for word in _OF_GPU_PY)
            if hook_name(hook) == names.HOOK and ours:
                spec = spec.drop_hooks(stage, (names.HOOK,))
    return spec


def has_hook(spec: "Spec") -> bool:
    """Return whether our hook is already there, for example from a podman hooks folder."""
    return any(
        hook_name(hook) == names.HOOK for stage in names.HOOK_STAGES for hook in spec.hooks(stage)
    )


def add_hook(
    spec: "Spec",
    config: "Config",
    folder: str,
    words: "Sequence[str]" = (),
    verb: str = "prestart",
) -> "Spec":
    """Return the spec with our hook as the last prestart hook; ``words`` lead to its worker."""
    path = os.path.join(os.path.abspath(folder), names.HOOK)
    if not os.access(path, os.X_OK):
        raise RuntimeMissingError(
            f"The hook {path} doesn't exist next to {names.RUNTIME}",
            "Reinstall gpuhook, so that both are in the same folder",
        )
    options = ["--config", os.path.abspath(config.path)] if config.path else []
    if spec.bundle and not words:  # the words already contain it
        options = [names.BUNDLE_OPTION, spec.bundle, *options]
    args = [names.HOOK, *words, *options, verb]
    # protects: hook-environment
    return spec.append(
        ("hooks", "prestart"), [{"path": path, "args": args, "env": names.HOOK_ENVIRONMENT}]
    )

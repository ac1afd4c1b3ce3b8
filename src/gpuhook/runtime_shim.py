"""gpu-py, the OCI runtime: add the hook and the device rules on create, then be the real one."""

import _signal  # type: ignore[import-not-found]
import os
import sys

from gpuhook import log, names
from gpuhook.config import Config, load
from gpuhook.errors import (
    CommandLineError,
    ConfigError,
    GpuhookError,
    RuntimeMissingError,
    SpecError,
    UnusableSpecError,
    shown,
)
from gpuhook.oci.runtime_argv import Arguments
from gpuhook.start import preload

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import NoReturn

    from gpuhook.inventory.model import Inventory
    from gpuhook.oci.spec import Spec
    from gpuhook.resolve import Resolved

HELPER_OPTION = "--helper"


def main(
    launcher: str,
    argv: list[str],
    environment: dict[bytes, bytes],
    umask: int,
    *,
    save: bool = False,
) -> "NoReturn":
    """Act on a command line and become the low-level runtime, or exit with status 1.

    ``launcher`` is the absolute path of gpu-py, ``argv`` the words after it,
    ``environment`` what the low-level runtime is to get, and ``umask`` too where the container gets
    no GPU: where it does, that runtime makes the places to mount the driver's files on. With
    ``save``, what the launcher must know of the configuration is saved for it.
    """
    arguments = Arguments(argv)
    config = Config()
    try:
        creating = arguments.verb in names.CREATING_VERBS
        config = _load_config(creating)
        if save:
            from gpuhook.start import launcher_files  # noqa: PLC0415 - once after every change

            launcher_files.save(config.path)
        runtime = find_runtime(config.runtimes, environment.get(b"PATH", b""), launcher)
        if arguments.unclear:
            raise _unclear(arguments.unclear)
        if not (creating and prepare_bundle(arguments, config, launcher)):
            os.umask(umask)
        _become(runtime, argv, environment)
    except GpuhookError as error:
        log.error(names.RUNTIME, str(error), config, arguments.log)
        sys.exit(1)


def _unclear(word: str) -> CommandLineError:
    return CommandLineError(
        f"It isn't clear what {shown(word)} means to the low-level runtime in this command line",
        f"Write options in full, before the id: {names.RUNTIME} --root DIR create --bundle DIR ID",
    )


def _load_config(creating: bool) -> Config:
    """Load the configuration; one that can't be read must not stop kill, delete or state."""
    try:
        return load()
    except ConfigError:
        if creating:
            raise
        return Config()


def _become(runtime: str, argv: list[str], environment: dict[bytes, bytes]) -> "NoReturn":
    # Python ignores these two, and what is ignored stays so across exec, into every hook.
    for number in (_signal.SIGPIPE, _signal.SIGXFSZ):
        _signal.signal(number, _signal.SIG_DFL)
    try:
        os.execve(runtime, [runtime, *argv], environment)  # noqa: S606 - becoming it is the point
    except OSError as error:
        raise RuntimeMissingError(
            f"The low-level runtime {runtime} can't be started: {error.strerror}",
            "Reinstall it, or name another in [nvidia-container-runtime] runtimes",
        ) from None


def find_runtime(candidates: tuple[str, ...], path: bytes, launcher: str) -> str:
    """Return the first low-level runtime that exists; RuntimeMissingError if none does.

    A candidate with a slash is a path, another one is looked for in PATH and then in the
    usual folders. ``launcher`` is never its own low-level runtime.
    """
    ourselves = os.path.realpath(launcher)
    folders = [folder for folder in os.fsdecode(path).split(":") if folder.startswith("/")]
    for candidate in candidates:
        if "/" in candidate:
            places = [candidate]
        else:
            places = [
                f"{folder}/{candidate}" for folder in (*folders, *names.SEARCH_PATH.split(":"))
            ]
        for place in places:
            usable = os.path.isfile(place) and os.access(place, os.X_OK)
            if usable and os.path.realpath(place) != ourselves:
                return place
    raise RuntimeMissingError(
        f"None of the low-level runtimes {', '.join(candidates) or '(empty list)'} was found",
        "Install runc or crun, or name one in [nvidia-container-runtime] runtimes of config.toml",
    )


def prepare_bundle(arguments: Arguments, config: Config, launcher: str) -> bool:
    """Rewrite a bundle's config.json for the GPUs it asks for; tell whether it asks for any.

    One that isn't there, or is no JSON for anybody, is for the low-level runtime to refuse, in
    its own words. A helper is started that does the hook's work while we are that runtime.
    """
    from gpuhook.oci.spec import read_spec  # noqa: PLC0415 - pass-through verbs don't need it

    def helped(spec: "Spec", resolved: "Resolved") -> list[str]:
        from gpuhook.start import helper  # noqa: PLC0415 - only where a GPU is asked for

        # Whoever runs a container to its end waits, as crun does, for all that was started.
        stays = launcher if config.standby and arguments.verb == "create" else ""
        return helper.start(spec, config, resolved, stays)

    try:
        spec = read_spec(os.path.join(arguments.bundle or "", "config.json"))
    except UnusableSpecError:
        return False
    edited = edit(spec, config, os.path.dirname(launcher), helped if config.helper else None)
    if edited is not None:
        edited.write()
    return edited is not None


def edit(
    spec: "Spec",
    config: Config,
    folder: str,
    helped: "Callable[[Spec, Resolved], list[str]] | None" = None,
    inventories: "Mapping[str, Inventory] | None" = None,
) -> "Spec | None":
    """Return a spec with what its devices need; None where it gets none.

    ``folder`` is where gpuhook-prestart lies. ``helped`` finds a helper for the hook and
    returns the words that lead to it, none where there is no helper. ``inventories``, by
    vendor, are known to be the machine's.
    """
    from gpuhook.resolve import resolve  # noqa: PLC0415 - as in prepare_bundle

    resolved = resolve(spec.data, config, inventories=inventories)
    if resolved is None or not (resolved.grants or resolved.cdi_devices):
        if resolved is not None:
            log.without(spec.path, resolved.absent, config)
        # It may have devices all the same: engines carry out documents themselves.
        edited = _lease(spec, resolved, config, folder, "") if config.exclusive else spec
        return None if edited is spec else edited
    spec.require_mount_namespace()
    edited = _edit_process(_apply_documents(spec, resolved, config), resolved)
    way = "cdi"
    if resolved.grants:
        preload.load(preload.EDIT)
        from gpuhook.request import reader  # noqa: PLC0415 - only where a GPU is asked for

        way = reader.effective_mode(config.mode, resolved.requests)
        if way == "spec":
            edited = _edit_spec(edited, resolved, config)
        else:
            edited = _edit_for_hook(edited, resolved, config, folder, helped)
    if config.exclusive:
        edited = _lease(edited, resolved, config, folder, way)
    log.edited(spec.path, way, (*resolved.ids, *resolved.cdi_devices), config)
    return edited


def _lease(
    spec: "Spec", resolved: "Resolved | None", config: Config, folder: str, way: str
) -> "Spec":
    """Return the spec with a hook that takes exclusive devices for the container, where needed.

    HeldError where another container has one now. In the way ``hook`` the hook that injects
    takes them.
    """
    from gpuhook.running import claims  # noqa: PLC0415 - few have exclusive devices

    if not claims.check(spec, resolved, config) or way == "hook":
        return spec
    return add_hook(make_way(spec), config, folder, verb=names.LEASE_VERB)


def _apply_documents(spec: "Spec", resolved: "Resolved", config: Config) -> "Spec":
    """Return the spec with what CDI documents say of the devices that they describe."""
    if not resolved.cdi_devices:
        return spec
    from gpuhook.cdi import apply, saved  # noqa: PLC0415 - only for documents

    found = saved.look(config)
    edits = apply.resolve(found, resolved.cdi_devices)
    apply.check_writers(found, resolved.cdi_devices)
    return apply.apply_to_spec(spec, edits)


def _edit_process(spec: "Spec", resolved: "Resolved") -> "Spec":
    """Return the spec with the variables and groups that its process needs."""
    if not resolved.settings and not resolved.groups:
        return spec
    from gpuhook.oci import process  # noqa: PLC0415 - few vendors need it

    for each in resolved.settings:
        spec = process.set_variable(spec, each)
    return process.add_groups(spec, resolved.groups)


def _edit_for_hook(
    spec: "Spec",
    resolved: "Resolved",
    config: Config,
    folder: str,
    helped: "Callable[[Spec, Resolved], list[str]] | None",
) -> "Spec":
    """Return the spec with the device rules and our hook, if it hasn't got it already."""
    devices = dict.fromkeys(pair for grant in resolved.grants for pair in grant.rules())
    _link_nodes(spec, resolved)
    spec = _add_device_rules(make_way(spec), list(devices))
    if has_hook(spec):
        return spec
    words = helped(spec, resolved) if helped is not None else []
    return add_hook(spec, config, folder, [HELPER_OPTION, *words] if words else [])


def _link_nodes(spec: "Spec", resolved: "Resolved") -> None:
    """Let systemd, where it manages the container's cgroup, find the devices allowed in it."""
    from gpuhook.cgroup import dev_char  # noqa: PLC0415 - only where a GPU is asked for

    linux = spec.data.get("linux")
    if isinstance(linux, dict) and dev_char.wanted(linux.get("cgroupsPath")):
        for grant in resolved.grants:
            allowed = grant.rules()
            nodes = grant.inventory.nodes
            given = (node for node in nodes if node.numbers in allowed)
            dev_char.make_links(given, grant.inventory.root)


def _edit_spec(spec: "Spec", resolved: "Resolved", config: Config) -> "Spec":
    """Return the spec with all that mode spec does, for the image as the engine laid it out."""
    from gpuhook.container.rootfs import Rootfs  # noqa: PLC0415
    from gpuhook.plan import image, spec_edits  # noqa: PLC0415 - only in mode spec
    from gpuhook.plan.operations import usable  # noqa: PLC0415
    from gpuhook.plan.planner import Plan, make_plan  # noqa: PLC0415

    try:
        with Rootfs(spec.root_path) as root:
            found = image.look(root, config, resolved.looks())
    except OSError as error:
        raise SpecError(
            f"The root filesystem {spec.root_path} can't be opened: {error.strerror}",
            "Have it mounted before the runtime is called, or use mode hook",
        ) from None
    for stage in names.HOOK_STAGES:  # nothing is left for them to do
        spec = spec.drop_hooks(stage, (*names.TOOLKIT_HOOKS, names.HOOK))
    plan = Plan(usable(make_plan(resolved.grants, found, resolved.groups).operations)[0])
    return spec_edits.apply(_add_device_rules(spec, plan.devices), plan)


def _add_device_rules(spec: "Spec", devices: list[tuple[int, int]]) -> "Spec":
    from gpuhook.cgroup import access  # noqa: PLC0415 - only where a GPU is asked for

    missing = [pair for pair in devices if not access.spec_allows(spec.device_rules, *pair)]
    if not missing:
        return spec
    return spec.append(("linux", "resources", "devices"), access.device_rules(missing))


def make_way(spec: "Spec") -> "Spec":
    """Return a spec without the hooks that ours replaces.

    NVIDIA's, which Docker's --gpus adds, and our own of an earlier start, whose helper is gone
    or which took a lease alone.
    """
    from gpuhook.oci.spec import hook_name  # noqa: PLC0415 - as in prepare_bundle

    for stage in names.HOOK_STAGES:
        spec = spec.drop_hooks(stage, names.TOOLKIT_HOOKS)
        for hook in spec.hooks(stage):
            ours = {HELPER_OPTION, names.LEASE_VERB}.intersection(hook.get("args") or ())
            if hook_name(hook) == names.HOOK and ours:
                spec = spec.drop_hooks(stage, (names.HOOK,))
    return spec


def has_hook(spec: "Spec") -> bool:
    """Tell whether somebody else, a hooks folder of podman's, has added our hook already."""
    from gpuhook.oci.spec import hook_name  # noqa: PLC0415 - as in prepare_bundle

    return any(
        hook_name(hook) == names.HOOK for stage in names.HOOK_STAGES for hook in spec.hooks(stage)
    )


def add_hook(
    spec: "Spec",
    config: Config,
    folder: str,
    words: "Sequence[str]" = (),
    verb: str = "prestart",
) -> "Spec":
    """Return the spec with our hook as the last prestart hook; ``words`` lead to its helper."""
    path = os.path.join(os.path.abspath(folder), names.HOOK)
    if not os.access(path, os.X_OK):
        raise RuntimeMissingError(
            f"The hook {path} doesn't exist beside {names.RUNTIME}",
            "Reinstall gpuhook, so that both lie in one folder",
        )
    options = ["--config", os.path.abspath(config.path)] if config.path else []
    args = [names.HOOK, *words, *options, verb]
    return spec.append(
        ("hooks", "prestart"), [{"path": path, "args": args, "env": names.HOOK_ENVIRONMENT}]
    )

"""gpuhook-prestart, the OCI hook: injection of the devices that a container requests."""

import os
import sys

from gpuhook import __version__
from gpuhook.base import log, names
from gpuhook.base.config.loader import load
from gpuhook.base.config.model import Config
from gpuhook.base.errors import AnyDeviceError, GpuhookError, InjectError, SpecError
from gpuhook.base.fileio import read_start
from gpuhook.base.oci.spec import Spec, parse_state, read_spec
from gpuhook.core.resolve import find_memory_limits, resolve
from gpuhook.vendors import registry

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

    from gpuhook.base.oci.spec import ContainerState
    from gpuhook.core.edit import EditResult
    from gpuhook.core.memory_limits import MemoryLimits
    from gpuhook.core.resolve import Allocation

USAGE = f"""usage: {names.HOOK} [--config FILE] [--bundle DIR] [prestart | precreate | lease]
       {names.HOOK} -version

Reads an OCI container state on standard input and injects the GPUs that the container
requests. Register it as a prestart or createRuntime hook.

DIR is the container's bundle. It is used if the state names only /, as crun's does for a
container with a user namespace and devices. gpu-py passes it.

With precreate, podman's stage before it calls the runtime, it reads a config.json instead,
and prints it with the device rules and the hook that its GPUs need.

With lease, it only allocates exclusive devices to the container and limits the memory of
its devices. gpu-py uses this if it adds the devices to config.json itself.
"""
_MAX_STATE = 16 << 20
_INPUT = "The configuration on standard input"
_MAX_SPEC = 64 << 20
# NVIDIA's hook accepts these verbs and does nothing; hook files name them.
_IDLE_VERBS = ("poststart", "poststop")
_VERBS = ("prestart", names.LEASE_VERB, *_IDLE_VERBS)
_OPTIONS = ("--config", "-config", names.BUNDLE_OPTION)


def main(argv: list[str]) -> "NoReturn":
    """Run the hook with the given arguments; exit with status 0, 1 or 2."""
    if "-h" in argv or "--help" in argv:
        sys.stdout.write(USAGE)
        sys.exit(0)
    if argv[:1] in (["-v"], ["-version"], ["--version"]):
        sys.stdout.write(f"{names.HOOK} {__version__}\n")
        sys.exit(0)
    words = [word for word in argv if word != names.HELPER_KILLED]
    config_path, bundle, verb = read_arguments(words)
    state = _drain(_MAX_STATE)
    if verb in _IDLE_VERBS:
        sys.exit(0)
    config = Config()
    try:
        config = load(config_path)
        if names.HELPER_KILLED in argv:
            raise InjectError("The helper was killed", "Start the container again")
        (take if verb == names.LEASE_VERB else run)(state, config, bundle)
    except GpuhookError as error:
        log.error(names.HOOK, str(error), config)
        sys.exit(1)
    os._exit(0)  # nothing is buffered, and a regular exit of the interpreter takes 2 ms


def read_arguments(argv: list[str]) -> tuple[str | None, str, str]:
    """Return the configuration file (None: none), the bundle ("": none) and the verb.

    Other arguments print the usage and exit with status 2.
    """
    given: dict[str, str] = {}
    words = list(argv)
    verbs = []
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if name not in _OPTIONS:
            verbs.append(word)
        else:
            given[name.lstrip("-")] = value if equals else (words.pop(0) if words else "")
    if "" in given.values() or verbs not in ([], *[[verb] for verb in _VERBS]):
        sys.stderr.write(USAGE)
        sys.exit(2)
    bundle = given.get("bundle", "")
    return given.get("config"), bundle, verbs[0] if verbs else "prestart"


def _drain(most: int) -> bytes:
    """Read all of standard input, so that the writer never fails; keep ``most`` bytes and one."""
    data = b""
    try:
        data = read_start(0, most + 1)
        while os.read(0, 1 << 16):
            pass
    except OSError:
        pass
    return data


def _read(state_text: bytes, bundle: str) -> "tuple[ContainerState, Spec]":
    """Return a container's state and its config.json; ``bundle`` is the one in the arguments."""
    state = parse_state(state_text)
    if state.bundle == "/":
        from gpuhook.base.oci import lost_bundle  # noqa: PLC0415 - few containers need it

        return lost_bundle.read(state, bundle)
    return state, read_spec(os.path.join(state.bundle, "config.json"))


def run(state_text: bytes, config: Config, bundle: str = "") -> None:
    """Inject the devices that the container requests; GpuhookError if that fails.

    ``bundle`` is the one in the arguments, "" for none.
    """
    state, spec = _read(state_text, bundle)
    resolved = _resolved(state, spec, config)
    if resolved is not None and resolved.absent and not resolved.grants:
        log.without(spec.path, resolved.absent, config)
    if resolved is not None and resolved.grants:  # the runtime applies CDI specs
        from gpuhook.inject import Injection  # noqa: PLC0415 - only for requests of a GPU

        resolved.import_hook_modules()

        Injection(spec, config, resolved).finish(state)
        return
    found = find_memory_limits(spec, config, registry.all_vendors(config), resolved)
    if found is not None:
        _take(state, spec, resolved, config, found)


def _resolved(state: "ContainerState", spec: "Spec", config: Config) -> "Allocation | None":
    return resolve(
        spec.data, config, registry.all_vendors(config),
        container=state.container_id, starter=os.getpid(), path=spec.path,
    )  # fmt: skip


def take(state_text: bytes, config: Config, bundle: str) -> None:
    """Allocate the container's exclusive devices to it, and limit the memory of its devices.

    ``bundle`` is as for ``run``. HeldError or MemoryLimitError if that fails.
    """
    state, spec = _read(state_text, bundle)
    resolved = _resolved(state, spec, config)
    found = find_memory_limits(spec, config, registry.all_vendors(config), resolved)
    chosen = resolved is not None and resolved.chosen
    if config.exclusive or chosen or found is not None:
        _take(state, spec, resolved, config, found)


def _take(
    state: "ContainerState",
    spec: "Spec",
    resolved: "Allocation | None",
    config: Config,
    found: "MemoryLimits | None",
) -> None:
    from gpuhook.core.records import exclusive_request  # noqa: PLC0415
    from gpuhook.inject import open_container  # noqa: PLC0415 - few containers need it, and claims

    vendors = registry.all_vendors(config)
    with open_container(state.pid, state.root or spec.root_path) as container:
        exclusive_request.take(container, state, spec, resolved, vendors, config, found)


def precreate(folder: str, argv: list[str]) -> "NoReturn":
    """Run podman's precreate hook, which edits config.json before podman calls its runtime.

    podman writes it to our standard input, and reads the edited one from standard output
    (oci-hooks(5), "precreate"). This adds device rules and our prestart hook with any runtime. Exit
    with status 0, or with 1 and an error message.

    ``folder`` contains gpuhook-prestart; ``argv`` may contain ``--config FILE``.
    """
    config_path, _, _ = read_arguments(argv)
    text = _drain(_MAX_SPEC)
    config = Config()
    try:
        config = load(config_path)
        if len(text) > _MAX_SPEC:
            raise SpecError(f"{_INPUT} is larger than {_MAX_SPEC >> 20} MiB", "Make it smaller")
        spec = Spec(_INPUT, text.decode("utf-8", "surrogateescape"))
        edited = _edited(spec, config, folder)
    except GpuhookError as error:
        log.error(names.HOOK, str(error), config)
        sys.exit(1)
    with open(1, "wb") as output:
        output.write(text if edited is None else edited.finish().encoded())
    sys.exit(0)


def _edited(spec: Spec, config: Config, folder: str) -> "EditResult | None":
    """Return podman's config.json edited for its devices, None if it has none.

    Free devices are left to the hook, which adds their device rules to the cgroup itself: podman
    names no container here, and no process lives from here to its start.
    """
    from gpuhook.core import edit  # noqa: PLC0415 - only for this stage

    try:
        return edit.edit(spec, config, registry.all_vendors(config), folder)
    except AnyDeviceError as error:
        if config.mode not in ("hook", "auto"):
            error.remedy = "Use gpu-py as podman's runtime, or mode hook"
            raise
        hooked = edit.add_hook(edit.without_old_hooks(spec), config, folder)
        return edit.EditResult(hooked, config, folder)

"""gpuhook-prestart, the OCI hook: read the state, work out the request, inject what it means."""

import os
import sys

from gpuhook import __version__
from gpuhook.ground import log, names
from gpuhook.ground.config.loader import load
from gpuhook.ground.config.model import Config
from gpuhook.ground.errors import GpuhookError, InjectError, SpecError
from gpuhook.ground.fileio import read_start
from gpuhook.ground.oci.spec import Spec, parse_state, read_spec
from gpuhook.start.resolve import limits, resolve
from gpuhook.vendors import registry

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

    from gpuhook.ground.oci.spec import State
    from gpuhook.start.limits import Limits
    from gpuhook.start.resolve import Resolved

USAGE = f"""usage: {names.HOOK} [--config FILE] [--bundle DIR] [prestart | precreate | lease]
       {names.HOOK} -version

Reads an OCI container state on standard input and puts the GPUs that the container asks
for into it. Register it as a prestart or createRuntime hook.

DIR is the container's bundle, for where the state has none but /: crun's, for a container
with a user namespace and devices. gpu-py names it.

With precreate, podman's stage before the runtime is called, reads a config.json instead,
and prints it with the device rules and the hook that its GPUs need.

With lease, which gpu-py adds where it puts the devices into config.json itself, it takes
exclusive devices for the container, limits its devices' memory, and does nothing else.
"""
_STATE_LIMIT = 16 << 20
_INPUT = "The configuration on standard input"
_SPEC_LIMIT = 64 << 20
# NVIDIA's hook has verbs of which only the first does anything; hook files name them.
_IDLE_VERBS = ("poststart", "poststop")
_VERBS = ("prestart", names.LEASE_VERB, *_IDLE_VERBS)
_OPTIONS = ("--config", "-config", names.BUNDLE_OPTION)


def main(argv: list[str]) -> "NoReturn":
    """Act as the hook on the words after the program's name; exit with 0, 1 or 2."""
    if "-h" in argv or "--help" in argv:
        sys.stdout.write(USAGE)
        sys.exit(0)
    if argv[:1] in (["-v"], ["-version"], ["--version"]):
        sys.stdout.write(f"{names.HOOK} {__version__}\n")
        sys.exit(0)
    words = [word for word in argv if word != names.HELPER_KILLED]
    config_path, bundle, verb = read_arguments(words)
    state = _drain(_STATE_LIMIT)
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
    os._exit(0)  # nothing is buffered, and taking the interpreter apart takes 2 ms


def read_arguments(argv: list[str]) -> tuple[str | None, str, str]:
    """Return the configuration file given (None: none), the bundle ("": none) and the verb.

    Other words: usage, and exit 2.
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
    """Read standard input to its end, so that the writer never fails; keep a byte over ``most``."""
    data = b""
    try:
        data = read_start(0, most + 1)
        while os.read(0, 1 << 16):
            pass
    except OSError:
        pass
    return data


def _read(state_text: bytes, bundle: str) -> "tuple[State, Spec]":
    """Return a container's state and its config.json; ``bundle`` is what an argument names."""
    state = parse_state(state_text)
    if state.bundle == "/":
        from gpuhook.ground.oci import lost_bundle  # noqa: PLC0415 - few containers need it

        return lost_bundle.read(state, bundle)
    return state, read_spec(os.path.join(state.bundle, "config.json"))


def run(state_text: bytes, config: Config, bundle: str = "") -> None:
    """Inject what the container of this state asks for; GpuhookError if that can't be done.

    ``bundle`` is the one that an argument names, "" for none.
    """
    state, spec = _read(state_text, bundle)
    resolved = resolve(spec.data, config, registry.known(config), container=state.container_id)
    if resolved is not None and resolved.absent and not resolved.grants:
        log.without(spec.path, resolved.absent, config)
    if resolved is not None and resolved.grants:  # what documents give is the runtime's to do
        resolved.preload_injection()
        from gpuhook.inject import Injection  # noqa: PLC0415 - only where a GPU is asked for

        Injection(spec, config, resolved).finish(state)
        return
    found = limits(spec, config, registry.known(config), resolved)
    if found is not None:
        _take(state, spec, resolved, config, found)


def take(state_text: bytes, config: Config, bundle: str) -> None:
    """Take what the container of this state has of exclusive devices, and limit their memory.

    ``bundle`` is as for ``run``. HeldError or LimitError if that can't be.
    """
    state, spec = _read(state_text, bundle)
    known = registry.known(config)
    resolved = resolve(spec.data, config, known, container=state.container_id)
    found = limits(spec, config, known, resolved)
    if config.exclusive or found is not None:
        _take(state, spec, resolved, config, found)


def _take(
    state: "State",
    spec: "Spec",
    resolved: "Resolved | None",
    config: Config,
    found: "Limits | None",
) -> None:
    from gpuhook.inject import open_container  # noqa: PLC0415 - few containers need it, and claims
    from gpuhook.start.records import claims  # noqa: PLC0415

    known = registry.known(config)
    with open_container(state.pid, state.root or spec.root_path) as container:
        claims.take(container, state, spec, resolved, known, config, found)


def precreate(folder: str, argv: list[str]) -> "NoReturn":
    """Be podman's hook of that stage: edit a config.json on its way to the runtime.

    podman hands it over on standard input before it calls its runtime, and takes the edited
    one from standard output (oci-hooks(5), "precreate"). So device rules and our prestart hook
    get into it whatever the runtime is. Exits with 0, or with 1 and the reason.

    ``folder`` is where gpuhook-prestart lies; ``argv`` may hold ``--config FILE``.
    """
    from gpuhook.start.edit import edit  # noqa: PLC0415 - of this stage alone

    config_path, _, _ = read_arguments(argv)
    text = _drain(_SPEC_LIMIT)
    config = Config()
    try:
        config = load(config_path)
        if len(text) > _SPEC_LIMIT:
            raise SpecError(f"{_INPUT} is larger than {_SPEC_LIMIT >> 20} MiB", "Make it smaller")
        spec = Spec(_INPUT, text.decode("utf-8", "surrogateescape"))
        edited = edit(spec, config, registry.known(config), folder)
    except GpuhookError as error:
        log.error(names.HOOK, str(error), config)
        sys.exit(1)
    with open(1, "wb") as output:
        output.write(text if edited is None else edited.finish().encoded())
    sys.exit(0)

"""What a shell completes beyond commands, options and choices: keys, devices, containers, files.

Nothing here asks a driver or waits for long, and what fails completes nothing: an error has no
place in a line that is being typed.
"""

import os
from collections.abc import Callable, Iterable, Iterator

import click
from click import shell_completion
from click.shell_completion import BashComplete, CompletionItem, FishComplete

from gpuhook.ground.config.loader import load
from gpuhook.ground.config.model import (
    ALL_CAPABILITIES,
    CUDA_COMPAT_MODES,
    FEATURE_PREFIX,
    FEATURES,
    KEYS,
    LOG_LEVELS,
    MISSING_DRIVER,
    MODES,
    Config,
)
from gpuhook.ground.config.source import BOOL

_PATIENCE = 0.5  # seconds for one Docker's answer
_KINDS = {"FILE": "file", "[FILE]...": "file", "PATH": "file", "DIR": "dir", "FOLDER": "dir"}
_WORDS = {
    "nvidia-container-runtime.mode": tuple(MODES),
    "nvidia-container-runtime.log-level": LOG_LEVELS,
    "nvidia-container-runtime.modes.legacy.cuda-compat-mode": CUDA_COMPAT_MODES,
    "gpuhook.missing-driver": MISSING_DRIVER,
}

Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def never_failing(find: Callable[[click.Context, str], Iterable[str]]) -> Complete:
    """Make a function that finds words, by the line so far and what is typed, one for click."""

    def complete(ctx: click.Context, _: click.Parameter, typed: str) -> list[CompletionItem]:
        try:
            found = list(find(ctx, typed))
        except Exception:  # noqa: BLE001 - see above
            return []
        return [CompletionItem(word) for word in found if word.startswith(typed)]

    return complete


def _config(ctx: click.Context) -> Config:
    return load(ctx.params.get("config_path"))


@never_failing
def settings(_: click.Context, typed: str) -> Iterator[str]:
    """Complete KEY=VALUE of config.toml."""
    key, equals, _value = typed.partition("=")
    every = [*KEYS, *(FEATURE_PREFIX + name for name in FEATURES)]
    if not equals:
        yield from (f"{each}=" for each in every)
    elif key not in KEYS or KEYS[key][1] == BOOL:
        yield from (f"{key}=true", f"{key}=false")
    else:
        yield from (f"{key}={word}" for word in _WORDS.get(key, ()))


@never_failing
def engines(*_: object) -> Iterable[str]:
    """Complete the name of a container engine."""
    from gpuhook.tools.engines.known import ENGINES  # noqa: PLC0415 - here and below: only who asks for it waits

    return ENGINES


@never_failing
def vendors(ctx: click.Context, _: str) -> Iterable[str]:
    """Complete the name of a vendor, one that config.toml declares among them."""
    from gpuhook.vendors import registry  # noqa: PLC0415

    return registry.known(_config(ctx))


@never_failing
def kinds(ctx: click.Context, _: str) -> Iterable[str]:
    """Complete a CDI kind."""
    from gpuhook.vendors import registry  # noqa: PLC0415

    return [names.KIND for names in registry.known(_config(ctx)).values()]


@never_failing
def capabilities(_: click.Context, typed: str) -> Iterable[str]:
    """Complete a list of the driver's capabilities."""
    return _in_list(typed, ("all", *ALL_CAPABILITIES.split(",")))


@never_failing
def variables(ctx: click.Context, typed: str) -> Iterator[str]:
    """Complete NAME=VALUE of a container's environment, with the devices of this machine."""
    from gpuhook.vendors import registry  # noqa: PLC0415
    from gpuhook.vendors.nvidia.variables import DRIVER_CAPABILITIES  # noqa: PLC0415

    config = _config(ctx)
    known = registry.known(config)
    variable, equals, value = typed.partition("=")
    if not equals:
        yield from (f"{each}=" for names in known.values() for each in names.VARIABLES)
        yield f"{DRIVER_CAPABILITIES}="
    elif variable == DRIVER_CAPABILITIES:
        found = _in_list(value, ("all", *ALL_CAPABILITIES.split(",")))
        yield from (f"{variable}={each}" for each in found)
    else:
        labels = [
            label
            for names in known.values()
            if variable in names.VARIABLES
            for label in _devices(config, names.NAME)
        ]
        found = _in_list(value, ["all", "none", *labels] if labels else ["all", "none"])
        yield from (f"{variable}={each}" for each in found)


def _in_list(typed: str, words: Iterable[str]) -> list[str]:
    """Return a list separated by commas with each word that isn't in it yet at its end."""
    before, comma, _last = typed.rpartition(",")
    return [f"{before}{comma}{each}" for each in words if each not in before.split(",")]


def _devices(config: Config, vendor: str) -> list[str]:
    """Return what the devices are called, as saved at the last container start."""
    from gpuhook.start import contract  # noqa: PLC0415
    from gpuhook.start.inventory import cache  # noqa: PLC0415
    from gpuhook.vendors import registry  # noqa: PLC0415

    saved = cache.saved(config, contract.load(registry.known(config)[vendor]))
    devices = saved.devices if saved else ()
    return [name for each in devices for name in (each.label, each.id)]


@never_failing
def containers(ctx: click.Context, _: str) -> list[str]:
    """Complete a running container with a device: by its engine's name for it, else by its id."""
    from gpuhook.start.records import records  # noqa: PLC0415
    from gpuhook.tools.cli import _containers  # noqa: PLC0415
    from gpuhook.tools.running.names import Names  # noqa: PLC0415

    found = records.read_all(_config(ctx).state_dir)
    ids = [str(each["id"]) for each in found if each["id"]]
    names = Names(patience=_PATIENCE)
    names.ask([(str(each.get("engine", "")), each["id"], each.get("bundle", "")) for each in found])
    return [names.of(each)[0] or _containers.short(each) for each in ids]


class _Path(click.types.StringParamType):
    """A text that a shell completes as a file's name, or a folder's."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        del ctx, param
        return [CompletionItem(incomplete, type=self.kind)]


def complete_files(parameter: click.Parameter) -> None:
    """Have a parameter that takes a file or a folder, as its metavar says, completed so."""
    kind = _KINDS.get(parameter.metavar or "")
    if kind and parameter.type is click.STRING:
        parameter.type = _Path(kind)


class _Bash(BashComplete):
    """Completion for bash, which takes a word with = or : in it for several."""

    _breaks = frozenset("=:")
    _prefix = ""

    # Another key may need a value: no blank after =.
    source_template = BashComplete.source_template.replace(
        "COMPREPLY+=($value)",
        'COMPREPLY+=("$value")\n            [[ $value != *= ]] || compopt -o nospace',
    )

    def get_completion_args(self) -> tuple[list[str], str]:
        """Return the words before the one that is typed, and that one, each in one piece."""
        words = shell_completion.split_arg_string(os.environ["COMP_WORDS"])
        at = int(os.environ["COMP_CWORD"])
        whole: list[str] = []
        is_open = False
        for word in [*words, ""][1 : at + 1]:
            is_break = bool(word) and self._breaks.issuperset(word)
            if whole and (is_break or is_open):
                whole[-1] += word
            else:
                whole.append(word)
            is_open = is_break
        *args, typed = whole or [""]
        self._prefix = typed[: max(typed.rfind(each) for each in self._breaks) + 1]
        return args, typed

    def format_completion(self, item: CompletionItem) -> str:
        """Return what bash puts into the place of what follows the last = or :."""
        return f"{item.type},{item.value.removeprefix(self._prefix)}"


class _Fish(FishComplete):
    """Completion for fish, where a word or its help may have a comma in it."""

    source_template = FishComplete.source_template.replace(
        'string split "," ', 'string split --max 1 "," '
    )


def register() -> None:
    """Have click use what is here."""
    shell_completion.add_completion_class(_Bash)
    shell_completion.add_completion_class(_Fish)

"""Shell completion of values: configuration keys, devices, containers and files.

No completion queries a driver or waits long. A completion that fails offers nothing, because
an error must not appear in the line being typed.
"""

import os
from collections.abc import Callable, Iterable, Iterator

import click
from click import shell_completion
from click.shell_completion import BashComplete, CompletionItem, FishComplete

from gpuhook.base.config.loader import load
from gpuhook.base.config.model import (
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
from gpuhook.base.config.source import BOOL

_PATIENCE = 0.5  # seconds to wait for a Docker daemon's answer
_KINDS = {"FILE": "file", "[FILE]...": "file", "PATH": "file", "DIR": "dir", "FOLDER": "dir"}
_WORDS = {
    "nvidia-container-runtime.mode": tuple(MODES),
    "nvidia-container-runtime.log-level": LOG_LEVELS,
    "nvidia-container-runtime.modes.legacy.cuda-compat-mode": CUDA_COMPAT_MODES,
    "gpuhook.missing-driver": MISSING_DRIVER,
}

Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def never_failing(find: Callable[[click.Context, str], Iterable[str]]) -> Complete:
    """Turn a function of the context and the typed text into a completion for click."""

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
def keys(*_: object) -> Iterable[str]:
    """Complete a key of config.toml."""
    return [*KEYS, *(FEATURE_PREFIX + name for name in FEATURES)]


@never_failing
def engines(*_: object) -> Iterable[str]:
    """Complete the name of a container engine."""
    from gpuhook.tools.engines.known import ENGINES  # noqa: PLC0415 - here and below: imported only when completed

    return ENGINES


@never_failing
def vendors(ctx: click.Context, _: str) -> Iterable[str]:
    """Complete the name of a vendor, including vendors declared in config.toml."""
    from gpuhook.vendors import registry  # noqa: PLC0415

    return registry.all_vendors(_config(ctx))


@never_failing
def kinds(ctx: click.Context, _: str) -> Iterable[str]:
    """Complete a CDI kind."""
    from gpuhook.vendors import registry  # noqa: PLC0415

    return [names.KIND for names in registry.all_vendors(_config(ctx)).values()]


@never_failing
def capabilities(_: click.Context, typed: str) -> Iterable[str]:
    """Complete a list of the driver's capabilities."""
    return _in_list(typed, ("all", *ALL_CAPABILITIES.split(",")))


@never_failing
def variables(ctx: click.Context, typed: str) -> Iterator[str]:
    """Complete NAME=VALUE of a container's environment, with the devices of this host."""
    from gpuhook.vendors import registry  # noqa: PLC0415
    from gpuhook.vendors.nvidia.variables import DRIVER_CAPABILITIES  # noqa: PLC0415

    config = _config(ctx)
    vendors = registry.all_vendors(config)
    variable, equals, value = typed.partition("=")
    if not equals:
        yield from (f"{each}=" for names in vendors.values() for each in names.VARIABLES)
        yield f"{DRIVER_CAPABILITIES}="
    elif variable == DRIVER_CAPABILITIES:
        found = _in_list(value, ("all", *ALL_CAPABILITIES.split(",")))
        yield from (f"{variable}={each}" for each in found)
    else:
        labels = [
            label
            for names in vendors.values()
            if variable in names.VARIABLES
            for label in _devices(config, names.NAME)
        ]
        found = _in_list(value, ["all", "none", *labels] if labels else ["all", "none"])
        yield from (f"{variable}={each}" for each in found)


def _in_list(typed: str, words: Iterable[str]) -> list[str]:
    """Return the typed comma-separated list, extended by each word that it lacks."""
    before, comma, _last = typed.rpartition(",")
    return [f"{before}{comma}{each}" for each in words if each not in before.split(",")]


def _devices(config: Config, vendor: str) -> list[str]:
    """Return the device names saved at the last container start."""
    from gpuhook.core import contract  # noqa: PLC0415
    from gpuhook.core.inventory import cache  # noqa: PLC0415
    from gpuhook.vendors import registry  # noqa: PLC0415

    saved = cache.saved(config, contract.load(registry.all_vendors(config)[vendor]))
    devices = saved.devices if saved else ()
    return [name for each in devices for name in (each.label, each.id)]


@never_failing
def containers(ctx: click.Context, _: str) -> list[str]:
    """Complete a running container that has a device, by its name in the engine or its id."""
    from gpuhook.core.records import records  # noqa: PLC0415
    from gpuhook.tools.cli import _containers  # noqa: PLC0415
    from gpuhook.tools.running.names import Names  # noqa: PLC0415

    found = records.read_all(_config(ctx).state_dir)
    ids = [str(each["id"]) for each in found if each["id"]]
    names = Names(patience=_PATIENCE)
    names.ask([(str(each.get("engine", "")), each["id"], each.get("bundle", "")) for each in found])
    return [names.of(each)[0] or _containers.short(each) for each in ids]


class _Path(click.types.StringParamType):
    """A string that shells complete as a file or folder name."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        del ctx, param
        return [CompletionItem(incomplete, type=self.kind)]


def complete_files(parameter: click.Parameter) -> None:
    """Complete a parameter as a file or a folder if its metavar names one."""
    kind = _KINDS.get(parameter.metavar or "")
    if kind and parameter.type is click.STRING:
        parameter.type = _Path(kind)


class _Bash(BashComplete):
    """Completion for bash, which splits a word at = and :."""

    _breaks = frozenset("=:")
    _prefix = ""

    # The user types a value next, so bash must add no blank after =.
    source_template = BashComplete.source_template.replace(
        "COMPREPLY+=($value)",
        'COMPREPLY+=("$value")\n            [[ $value != *= ]] || compopt -o nospace',
    )

    def get_completion_args(self) -> tuple[list[str], str]:
        """Return the complete words, and the word being typed, without bash's splits."""
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
        """Return the replacement for the text after the last = or :."""
        return f"{item.type},{item.value.removeprefix(self._prefix)}"


class _Fish(FishComplete):
    """Completion for fish, whose words and help texts may contain a comma."""

    source_template = FishComplete.source_template.replace(
        'string split "," ', 'string split --max 1 "," '
    )


def register() -> None:
    """Register these completions with click."""
    shell_completion.add_completion_class(_Bash)
    shell_completion.add_completion_class(_Fish)

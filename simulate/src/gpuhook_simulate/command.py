"""``gpuhook simulate``: builds a driver root with simulated accelerators."""

import json
from collections.abc import Iterable
from typing import Any

import click
from click.core import ParameterSource

from gpuhook.base.config.loader import load
from gpuhook.base.config.model import Config
from gpuhook.base.errors import SimulateError, shown
from gpuhook.tools.cli import _completion as completing
from gpuhook.tools.cli._help import command
from gpuhook.tools.cli._output import config_option
from gpuhook.vendors import registry
from gpuhook.vendors.nvidia import names as nvidia
from gpuhook_simulate import vendors as simulators
from gpuhook_simulate.build import build as build_root
from gpuhook_simulate.place import is_simulated, remove
from gpuhook_simulate.vendors.nvidia import (
    Options,
    build,
    change,
    end_process,
    report_xid,
    run_process,
)
from gpuhook_simulate.vendors.nvidia.activity import parse_process
from gpuhook_simulate.vendors.nvidia.check import skipped_lines
from gpuhook_simulate.vendors.nvidia.machine import SimulatedMachine
from gpuhook_simulate.vendors.nvidia.models import MODELS
from gpuhook_simulate.vendors.nvidia.options import (
    NVLINKS,
    PLATFORMS,
    parse_failure,
    parse_mig,
    parse_mig_change,
    parse_numbers,
)
from gpuhook_simulate.vendors.nvidia.state import load_machine


def models_after(typed: str) -> list[str]:
    """Return completions for a list of models."""
    before, comma, _last = typed.rpartition(",")
    return [f"{before}{comma}{each}" for each in MODELS]  # a model may be repeated


@completing.never_failing
def _models(_: click.Context, typed: str) -> Iterable[str]:
    return models_after(typed)


# The parameters of every vendor's simulator; the others are only for NVIDIA's.
_COMMON = frozenset({"directory", "vendor", "gpus", "settings", "removing", "config_path"})
# Parameters that only change an existing machine, and parameters that change or build one.
_CHANGES = frozenset({"found", "xids", "device", "running", "ended"})
_BUILD_OR_CHANGE = frozenset({"mig", "lost"})
_ANY = frozenset({"directory", "style", "config_path"})
_REMOVE = frozenset({"removing", "vendor"})
# NVIDIA's settings, each of which is also an option, for compatibility.
_SETTINGS: dict[str, dict[str, Any]] = {
    "platform": {"type": click.Choice(PLATFORMS), "default": PLATFORMS[0]},
    "model": {"default": "H200", "shell_complete": _models},
    "driver-version": {"default": ""},
    "cuda-version": {"default": ""},
    "minors": {"default": ""},
    "mig": {"multiple": True},
    "lost": {"default": ""},
    "nvlink": {"type": click.Choice(NVLINKS), "default": NVLINKS[0]},
    "unplug": {"default": ""},
    "init-seconds": {"default": 0.0},
    "fail": {"default": ""},
    "driver-files": {"type": click.Path(exists=True, file_okay=False)},
    "drm": {"default": True},
    "compat32": {"is_flag": True},
    "imex-channels": {"default": 0},
    "features": {"default": ""},
    "libdir": {"default": ""},
    "seed": {"default": "gpuhook"},
}


@completing.never_failing
def _set(_: click.Context, typed: str) -> Iterable[str]:
    """Complete NAME=VALUE of NVIDIA's settings."""
    name, equals, value = typed.partition("=")
    if not equals:
        return [f"{each}=" for each in _SETTINGS]
    kind = _SETTINGS.get(name, {}).get("type")
    choices = kind.choices if isinstance(kind, click.Choice) else ()
    if name == "model":
        choices = tuple(models_after(value))
    return [f"{name}={each}" for each in choices]


def _nvidias(function: Any) -> Any:
    """Add NVIDIA's settings to a command as hidden options."""
    for name in reversed(_SETTINGS):
        if name not in _BUILD_OR_CHANGE:
            spelled = f"--{name}/--no-{name}" if name == "drm" else f"--{name}"
            function = click.option(spelled, hidden=True, **_SETTINGS[name])(function)
    return function


@command(
    examples={
        "gpuhook simulate /srv/gpus --gpus 8 --set model=H100": "Build a machine with eight H100",
        "gpuhook simulate /srv/gpus --mig 0:1g.10gb,2g.20gb": "Divide GPU 0 of that machine",
        "gpuhook simulate /srv/gpus --xid 79 --gpu 3": "Report an error of its GPU 3",
        "gpuhook simulate /srv/amd --vendor amd --gpus 2": "Build one with two AMD GPUs",
    },
)
@click.argument("directory", metavar="DIR", type=click.Path())
@click.option(
    "--vendor",
    shell_complete=completing.vendors,
    default=nvidia.NAME,
    metavar="NAME",
    show_default=True,
    help="The vendor whose devices to simulate.",
)
@click.option("--gpus", default=1, show_default=True, help="Number of GPUs.")
@click.option(
    "--set", "settings", multiple=True, metavar="NAME=VALUE", shell_complete=_set,
    help="A setting of the vendor's simulator; may be repeated. The settings of vendors other than "
    f"{nvidia.NAME} are on their pages. Those of {nvidia.NAME}: {', '.join(_SETTINGS)}.",
)  # fmt: skip
@_nvidias
@click.option(
    "--mig", multiple=True, metavar="GPU:PROFILE,...",
    help="Set the MIG devices of a GPU, also of a running machine; GPU:off disables MIG mode.",
)  # fmt: skip
@click.option("--lost", default="", metavar="GPU,...", help="GPUs that no longer answer.")
@click.option("--found", default="", metavar="GPU,...", help="Lost GPUs that answer again.")
@click.option(
    "--xid", "xids", multiple=True, type=int, metavar="NUMBER",
    help="Report this XID of --gpu; may be repeated.",
)  # fmt: skip
@click.option("--gpu", "device", metavar="GPU", help="Number or UUID of a GPU, or a MIG UUID.")
@click.option(
    "--process", "running", multiple=True, metavar="GPU,PID,BYTES,...",
    help="Add a process; SM, memory, encoder and decoder percent and a kind may follow.",
)  # fmt: skip
@click.option(
    "--end",
    "ended",
    multiple=True,
    type=int,
    metavar="PID",
    help="End the process with this number.",
)
@click.option("--remove", "removing", is_flag=True, help="Delete the simulated root DIR.")
@config_option
@click.option(
    "--format",
    "style",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="Output format.",
)
def simulate(
    directory: str,
    vendor: str,
    gpus: int,
    settings: tuple[str, ...],
    removing: bool,
    config_path: str | None,
    style: str,
    found: str,
    xids: tuple[int, ...],
    device: str | None,
    running: tuple[str, ...],
    ended: tuple[int, ...],
    **options: Any,
) -> None:
    """Build a simulated driver root in DIR, or replace an existing one.

    Point gpuhook at it with root = "DIR" in the [nvidia-container-cli] section of config.toml.
    All vendors, including declared ones, have --gpus and --set. NVIDIA's settings can also be given
    as options: --model H100.

    With only --mig, --lost, --found, --process, --end, and --xid with --gpu, the existing machine
    in DIR is changed, and programs that use it see the change.
    """
    if removing:
        if extra := _given() - _ANY - _REMOVE:
            raise SimulateError(
                f"--remove doesn't go with {_spelled(min(extra))}",
                "Use only --remove, or build or change the machine instead",
            )
        remove(directory)
        return
    if _is_change(directory):
        _report(directory, xids, device)
        _run(directory, running, ended)
        _change(directory, options["mig"], options["lost"], found)
        _show(load_machine(directory), directory, style)
        return
    if vendor != nvidia.NAME:
        click.echo("\n".join(_of_another(directory, vendor, gpus, settings, load(config_path))))
        return
    options |= _set_options(settings)
    built = build(_nvidia_options(directory, gpus, **options))
    as_json = style == "json"
    click.echo(json.dumps(built.to_json(), indent=2) if as_json else "\n".join(built.lines()))


def _given() -> frozenset[str]:
    """Return the names of the parameters that were given."""
    context = click.get_current_context()
    names = [str(parameter.name) for parameter in context.command.params]
    default = ParameterSource.DEFAULT
    return frozenset(name for name in names if context.get_parameter_source(name) is not default)


def _spelled(name: str) -> str:
    """Return the option of a parameter."""
    params = click.get_current_context().command.params
    return next(each.opts[0] for each in params if each.name == name)


def _is_change(directory: str) -> bool:
    """Tell whether to change a machine instead of building one; SimulateError if unclear."""
    given = _given() - _ANY
    building = given - _CHANGES - _BUILD_OR_CHANGE
    if given & _CHANGES and building:
        raise SimulateError(
            "--found, --xid, --gpu, --process and --end change a machine, others build one",
            "Build it first, and give these in a second command",
        )
    return bool(given & _CHANGES) or bool(given and not building and is_simulated(directory))


def _report(root: str, xids: tuple[int, ...], device: str | None) -> None:
    if bool(xids) != bool(device):
        raise SimulateError(
            "An XID needs one GPU or MIG device", "Give both, like --xid 79 --gpu 3"
        )
    for xid in xids:
        report_xid(root, xid, str(device))


def _run(root: str, running: tuple[str, ...], ended: tuple[int, ...]) -> None:
    for word in running:
        run_process(root, parse_process(word))
    for pid in ended:
        end_process(root, pid)


def _change(root: str, mig: tuple[str, ...], lost: str, found: str) -> None:
    if mig or lost or found:
        change(
            root,
            mig=parse_mig_change(mig),
            lost=frozenset(parse_numbers(lost, "--lost")),
            found=frozenset(parse_numbers(found, "--found")),
        )


def _show(machine: SimulatedMachine, root: str, style: str) -> None:
    """Print a machine's state, and the lines of its files that are skipped."""
    for skipped in skipped_lines(root, machine):
        click.echo(skipped, err=True)
    if style == "json":
        gpus = [{"number": gpu.index, **gpu.to_json()} for gpu in machine.gpus]
        click.echo(json.dumps({"gpus": gpus}, indent=2))
    else:
        click.echo("\n".join(line for gpu in machine.gpus for line in gpu.lines()))


def _set_options(words: tuple[str, ...]) -> dict[str, Any]:
    """Return NVIDIA's settings of --set, by the names of the equivalent options."""
    context = click.get_current_context()
    known = {each.opts[0].removeprefix("--"): each for each in context.command.params}
    values: dict[str, list[str]] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not name or not equals:
            raise _no_setting(word)
        if name not in _SETTINGS:
            raise SimulateError(
                f"NVIDIA's simulator has no setting {shown(name)}",
                f"Use some of {', '.join(_SETTINGS)}",
            )
        if str(known[name].name) in _given() or (name in values and not known[name].multiple):
            raise _no_setting(word)
        values.setdefault(name, []).append(value)
    return {
        str(known[name].name): known[name].type_cast_value(
            context, given if known[name].multiple else given[-1]
        )
        for name, given in values.items()
    }


def _no_setting(word: str) -> SimulateError:
    return SimulateError(
        f"{shown(word)} is not a setting", "Write --set NAME=VALUE once for each name"
    )


def _nvidia_options(
    root: str,
    gpus: int,
    *,
    model: str,
    minors: str,
    mig: tuple[str, ...],
    unplug: str,
    lost: str,
    fail: str,
    driver_files: str | None,
    features: str,
    libdir: str,
    **same: Any,
) -> Options:
    """Return the options of NVIDIA's simulator; ``same`` have the same name there."""
    return Options(
        root=root,
        gpus=gpus,
        models=tuple(word.strip() for word in model.split(",")),
        minors=parse_numbers(minors, "--minors"),
        mig=parse_mig(mig),
        unplugged=frozenset(parse_numbers(unplug, "--unplug")),
        failure=parse_failure(fail),
        lost=frozenset(parse_numbers(lost, "--lost")),
        driver_files=driver_files or "",
        features=frozenset(word.strip() for word in features.split(",") if word.strip()),
        library_dir=libdir.rstrip("/"),
        **same,
    )


def _of_another(
    root: str, vendor: str, count: int, words: tuple[str, ...], config: Config
) -> list[str]:
    """Build another vendor's root; return lines about the devices."""
    vendors = registry.all_vendors(config)
    names = vendors.get(vendor)
    if names is None:
        known = ", ".join(vendors)
        raise SimulateError(f"There is no vendor {shown(vendor)}", f"Use one of these: {known}")
    simulator = simulators.simulator(names)
    if simulator is None:
        raise SimulateError(
            f"The devices of {vendor} can't be simulated",
            f"Use another vendor, such as {nvidia.NAME}",
        )
    _check_options(vendor)
    if count < 0:
        raise SimulateError(f"{count} devices can't be simulated", "Give 0 or more")
    settings = _parse_settings(words)
    return build_root(root, lambda tree: list(simulator.simulate(tree, count, settings)))


def _check_options(vendor: str) -> None:
    """Raise SimulateError for an option that only NVIDIA's simulator has."""
    context = click.get_current_context()
    for parameter in context.command.params:
        name = str(parameter.name)
        given = context.get_parameter_source(name) is not ParameterSource.DEFAULT
        if given and name not in _COMMON:
            raise SimulateError(
                f"{parameter.opts[0]} is only for {nvidia.NAME}, not for {vendor}",
                "Drop it; other settings of a vendor's simulator are set with --set NAME=VALUE",
            )


def _parse_settings(words: tuple[str, ...]) -> dict[str, str]:
    settings: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not name or not equals or name in settings:
            raise _no_setting(word)
        settings[name] = value
    return settings

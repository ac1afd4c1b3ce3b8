"""gpuhook device-plugin: offer this host's devices to a Kubernetes cluster."""

import os
import sys
from collections.abc import Callable
from typing import Any

import click

from gpuhook.base.config.model import Config
from gpuhook.base.errors import PluginError, RequestError, printable
from gpuhook.cluster.device_plugin import configure, options
from gpuhook.cluster.device_plugin.allocate import ContainerResponse, allocate
from gpuhook.cluster.device_plugin.resources import resources
from gpuhook.cluster.device_plugin.settings import Settings
from gpuhook.cluster.device_plugin.state import PluginState, Resource
from gpuhook.cluster.plugin_option import FLAG, PluginOption
from gpuhook.core import contract
from gpuhook.core.inventory import cache
from gpuhook.core.inventory.model import Inventory
from gpuhook.monitor.followed import ConfigChanged, FollowedConfig, start_again
from gpuhook.monitor.vendors import survey
from gpuhook.tools.cli._help import command
from gpuhook.tools.cli._output import config_option, raise_last


def _options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add every option of the plugin, and NVIDIA's that have no effect, hidden."""
    for old in reversed([*options.INEFFECTIVE]):
        command = click.option(f"--{old.flag}", hidden=True)(command)
    for option in reversed(options.OPTIONS):
        names = [f"--{each}" for each in (option.flag, *option.old)]
        command = click.option(*names, option.flag.replace("-", "_"), **_look(option))(command)
    return command


def _look(option: PluginOption) -> dict[str, Any]:
    """Return click's settings of an option; its meaning is parsed elsewhere."""
    default = options.default(option)
    text = option.help
    if default is not None and "[default" not in text:
        text = f"{text}  [default: {_default(option, default)}]"
    metavar = "|".join(option.choices) or option.kind.metavar
    look: dict[str, Any] = {"metavar": metavar, "help": text, "multiple": option.kind.several}
    if option.kind is FLAG:
        look.update(is_flag=False, flag_value="true")
    return look


def _default(option: PluginOption, value: Any) -> str:
    if option.field == "kubelet_folder":
        return f"{value}/kubelet.sock"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value) or "none"


@command(
    "device-plugin",
    examples={
        "gpuhook device-plugin --dry-run": "Print the resources and a container's devices",
        "gpuhook device-plugin --mig-strategy single": "Serve MIG devices of one size as GPUs",
    },
)
@_options
@click.option(
    "--config-file", metavar="FILE",
    help="A file with these options, in the format of NVIDIA's plugin (version: v1).",
)  # fmt: skip
@click.option(
    "--dry-run", is_flag=True, help="Print the devices and what a container would get, and exit."
)
@config_option
def device_plugin(dry_run: bool, config_path: str | None, **given: Any) -> None:
    """Offer the host's devices to a Kubernetes cluster, as its device plugin.

    Registers the resources of every vendor with the kubelet, nvidia.com/gpu and others. Each
    option can also be set by an environment variable of the same name
    (MIG_STRATEGY, and GPUHOOK_INTERVAL for --interval and the others that NVIDIA's plugin
    doesn't have), or in a file; flags override the environment, and that overrides the file.
    Runs until it is stopped (SIGTERM, SIGINT). --dry-run needs no kubelet.
    """
    followed = FollowedConfig(config_path)
    config = followed.config
    flags = _flags(given)
    settings, warnings = configure.read(flags, os.environ)
    settings = configure.apply(settings, config)
    for warning in warnings:
        click.echo(f"gpuhook: {printable(warning)}.", err=True)
    if dry_run:
        _show(settings, config)
        return
    from gpuhook.cluster.device_plugin import service  # noqa: PLC0415 - not needed above

    try:
        sys.exit(service.run(settings, config, followed))
    except ConfigChanged:
        start_again()


def _flags(given: dict[str, Any]) -> dict[str, str]:
    """Return the given flags, by their names; several words as one list."""
    found = {}
    for key, value in given.items():
        text = ",".join(value) if isinstance(value, tuple) and value else value
        if isinstance(text, str):
            found[key.replace("_", "-")] = text
    return found


# Dry run ------------------------------------------------------------------------------------


def _show(settings: Settings, config: Config) -> None:
    """Print the resources, their devices, and what a container with the first device gets."""
    found, failed = survey.present(config, lambda vendor: (vendor, _asked(config, vendor)))
    state, warnings = resources(found, settings, config)
    for warning in warnings:
        click.echo(f"gpuhook: {printable(warning)}.", err=True)
    if not state.resources:
        raise PluginError(
            "There is no device to allocate",
            "See `gpuhook info` and `gpuhook doctor`",
        )
    _show_devices(state)
    for resource in state.resources:
        click.echo(f"\n{resource.name}: 1 gives a container\n{_first(resource, settings)}")
    raise_last(failed)


def _asked(config: Config, vendor: contract.Vendor) -> Inventory:
    """Return the driver's current state: a saved inventory may have a GPU that is lost since."""
    return cache.follow(config, vendor, ask=True).inventory


def _show_devices(state: PluginState) -> None:
    from gpuhook.tools.cli import _screen  # noqa: PLC0415 - costs a tenth of a second

    rows = [
        (
            resource.name,
            unit.id,
            resource.replicas,
            "-" if unit.numa is None else unit.numa,
            f"unhealthy: {unit.reason}" if unit.reason else "healthy",
        )
        for resource in state.resources
        for unit in resource.units
    ]
    _screen.show(
        _screen.table(
            ("RESOURCE", "DEVICE", "REPLICAS", "NUMA", "HEALTH"),
            rows,
            less=("NUMA", "REPLICAS", "RESOURCE"),
        )
    )


def _first(resource: Resource, settings: Settings) -> str:
    """Return the response for the first allocatable device, line by line."""
    ids = [name for name, unit in resource.offers().items() if not unit.reason]
    try:
        answer = allocate(resource, ids[:1] or [*resource.offers()][:1], settings)
    except RequestError as error:
        return f"  nothing: {error}"
    return "\n".join(f"  {line}" for line in _lines(answer)) or "  nothing"


def _lines(answer: ContainerResponse) -> list[str]:
    mounts = (
        f"{each.host} at {each.container}{', read-only' if each.read_only else ''}"
        for each in answer.mounts
    )
    nodes = (
        each.host if each.host == each.container else f"{each.host} as {each.container}"
        for each in answer.devices
    )
    return [
        *(f"variable    {name}={value}" for name, value in answer.envs.items()),
        *(f"mount       {each}" for each in mounts),
        *(f"node        {each}" for each in nodes),
        *(f"annotation  {key}={value}" for key, value in answer.annotations.items()),
        *(f"CDI device  {each}" for each in answer.cdi_devices),
    ]

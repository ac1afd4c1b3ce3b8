"""gpuhook unit-lines and nspawn-arguments: devices for systemd's units and machines."""

import click

from gpuhook.hpc.commands import options as _settings
from gpuhook.hpc.rootfs import units
from gpuhook.tools.cli._help import command
from gpuhook.tools.cli._output import config_option
from gpuhook.vendors import registry

_VARIABLE = next(iter(registry.BUILT_IN["nvidia"].VARIABLES))


@command(
    "unit-lines",
    examples={
        f"gpuhook unit-lines -e {_VARIABLE}=0": "For a service on the host's root",
        f"gpuhook unit-lines --rootfs /srv/app -e {_VARIABLE}=0": "For one with RootDirectory=",
    },
)
@_settings.request_options
@config_option
def unit_lines(
    rootfs: str, variables: tuple[str, ...], devices: tuple[str, ...], config_path: str | None
) -> None:
    """Print settings for a drop-in that allow a systemd unit to open devices.

    Use --rootfs for a unit with its own root, such as a portable service: the driver's files
    are mounted there, too.
    """
    plan, env = _settings.plan(rootfs, variables, devices, config_path, units.warnings)
    for line in units.service(plan, env, own_root=bool(rootfs)):
        click.echo(line)


@command(
    "nspawn-arguments",
    examples={
        f"gpuhook nspawn-arguments --rootfs /srv/box -e {_VARIABLE}=0": "One argument per line",
        f"gpuhook nspawn-arguments -e {_VARIABLE}=0": "For a root folder like Debian's",
    },
)
@_settings.request_options
@config_option
def nspawn_arguments(
    rootfs: str, variables: tuple[str, ...], devices: tuple[str, ...], config_path: str | None
) -> None:
    """Print the systemd-nspawn arguments that add devices to a machine, one per line.

    For a machine that machinectl starts, use gpuhook install --engine nspawn.
    """
    plan, env = _settings.plan(rootfs, variables, devices, config_path, units.warnings)
    for word in units.arguments(plan, env):
        click.echo(word)

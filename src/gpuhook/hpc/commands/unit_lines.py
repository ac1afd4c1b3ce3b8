"""gpuhook unit-lines: settings that add devices to a systemd unit."""

import click

from gpuhook.hpc.commands import options as _settings
from gpuhook.hpc.rootfs import units
from gpuhook.tools.cli._help import command
from gpuhook.tools.cli._output import config_option
from gpuhook.vendors import registry

_VARIABLE = next(iter(registry.KNOWN["nvidia"].VARIABLES))


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

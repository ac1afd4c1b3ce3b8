"""gpuhook lxc-lines: lines that add devices to an LXC container."""

import click

from gpuhook.hpc.commands import options as _settings
from gpuhook.hpc.lxc import lines
from gpuhook.tools.cli._help import command
from gpuhook.tools.cli._output import config_option
from gpuhook.vendors import registry

_VARIABLE = next(iter(registry.BUILT_IN["nvidia"].VARIABLES))


@command(
    "lxc-lines",
    examples={
        f"gpuhook lxc-lines --rootfs /var/lib/lxc/box/rootfs -e {_VARIABLE}=0": "For a folder",
        f"gpuhook lxc-lines -e {_VARIABLE}=0": "For a root like Debian's",
    },
)
@_settings.request_options
@click.option(
    "--unrestricted", is_flag=True,
    help="Omit cgroup2 rules: the container has none, as with userns.conf.",
)  # fmt: skip
@config_option
def lxc_lines(
    rootfs: str,
    variables: tuple[str, ...],
    devices: tuple[str, ...],
    unrestricted: bool,
    config_path: str | None,
) -> None:
    """Print lines for an LXC container's configuration that add devices to it.

    gpuhook install --engine lxc adds them to a container, and keeps them up to date. Run this as
    the user who starts the container: only root's containers get lines for the device cgroup.
    """
    plan, env = _settings.plan(rootfs, variables, devices, config_path, lines.warnings)
    versions = lines.versions(is_restricted=not unrestricted)
    for line in lines.lines(plan, env, rootfs or None, versions):
        click.echo(line)

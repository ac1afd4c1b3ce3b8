"""gpuhook repair: give back GPUs to running containers that lost access to them."""

import os
from collections.abc import Collection

import click

from gpuhook import containers
from gpuhook.cli._output import config_option
from gpuhook.config import load
from gpuhook.containers import Container
from gpuhook.errors import ContainerError, GpuhookError


@click.command(short_help="Give back GPUs to running containers that lost them.")
@click.argument("names", metavar="[CONTAINER]...", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="Repair every container that has a GPU.")
@config_option
def repair(names: tuple[str, ...], everything: bool, config_path: str | None) -> None:
    """Give back GPUs to running containers that lost access to them.

    For "Failed to initialize NVML: Unknown Error" in a container that worked before: systemctl
    daemon-reload or docker update has taken its device rules away. The container goes on
    running. CONTAINER is an id (or its beginning) or the engine's name for it.
    """
    from gpuhook import repair as repairs  # noqa: PLC0415 - only when the command runs
    from gpuhook.store import get_inventory  # noqa: PLC0415

    if bool(names) == everything:
        raise click.UsageError("name the containers, or give --all")
    inventory = get_inventory(load(config_path))
    devices = {(node.major, node.minor) for node in inventory.nodes}
    running = containers.running(devices)
    if os.geteuid() != 0:
        click.echo(containers.WITHOUT_ROOT, err=True)
    if everything:
        if not running:
            click.echo("No running container with a GPU was found.")
        failed = [each for each in running if not _repaired(each, devices)]
        if failed:
            raise ContainerError(
                f"{len(failed)} of the containers could not be repaired",
                "The messages above say why; stop and start these containers",
            )
        return
    for container in repairs.select(names, running):
        if not repairs.mounted_devices(container.pid, devices):
            raise ContainerError(
                f"No device node is mounted in {container.name}",
                "Start it again: its GPUs were given by somebody else than gpuhook",
            )
        how, count = repairs.repair(container, devices)
        click.echo(_line(container, how, count))


def _repaired(container: Container, devices: Collection[tuple[int, int]]) -> bool:
    """Repair one of many containers; those that others gave their GPUs are left alone."""
    from gpuhook import repair as repairs  # noqa: PLC0415 - as above

    try:
        how, count = repairs.repair(container, devices)
    except GpuhookError as error:
        click.echo(f"{container.name[:12]}: {error}", err=True)
        return False
    if count:
        click.echo(_line(container, how, count))
    return True


def _line(container: Container, how: str, count: int) -> str:
    return f"{container.name[:12]}: {count} devices allowed ({how})"

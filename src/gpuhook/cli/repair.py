"""gpuhook repair: give back GPUs to running containers that lost access to them."""

import os

import click

from gpuhook.cli import _completion as completing
from gpuhook.cli._help import command
from gpuhook.cli._output import config_option
from gpuhook.config import load
from gpuhook.errors import ContainerError, GpuhookError
from gpuhook.inventory.model import Inventory
from gpuhook.running import holders
from gpuhook.running.holders import Container
from gpuhook.vendors import seam


@command(
    examples={
        "gpuhook repair training": "Give the container called training its GPUs back",
        "gpuhook repair --all": "The same for all containers",
    },
)
@click.argument("names", metavar="[CONTAINER]...", nargs=-1, shell_complete=completing.containers)
@click.option("--all", "everything", is_flag=True, help="Repair every container that has a GPU.")
@config_option
def repair(names: tuple[str, ...], everything: bool, config_path: str | None) -> None:
    """Give back GPUs to running containers that lost access to them.

    For "Failed to initialize NVML: Unknown Error" in a container that worked before: systemctl
    daemon-reload or docker update has taken its device rules away. The container goes on
    running. It gets what was written down when it was started, never more. CONTAINER is an id
    (or its beginning) or the engine's name for it.
    """
    from gpuhook.inventory.cache import get_inventory  # noqa: PLC0415
    from gpuhook.running import repair as repairs  # noqa: PLC0415 - only when the command runs

    if bool(names) == everything:
        raise click.UsageError("name the containers, or give --all")
    config = load(config_path)
    inventories, _ = seam.present(config, lambda vendor: get_inventory(config, vendor))
    running = holders.running(inventories, config.state_dir)
    if os.geteuid() != 0:
        click.echo(holders.WITHOUT_ROOT, err=True)
    if everything:
        _repair_all(running, inventories)
        return
    for container in repairs.select(names, running):
        click.echo(_line(container, *repairs.repair(container, inventories)))


def _repair_all(running: list[Container], inventories: list[Inventory]) -> None:
    """Repair the containers that have a record; name those that haven't and can't be."""
    if not running:
        click.echo("No running container with a GPU was found.")
    failed = [each for each in running if not _repaired(each, inventories)]
    if any(each.record is not None for each in failed):
        raise ContainerError(
            f"{len(failed)} of the containers could not be repaired",
            "The messages above say why; stop and start these containers",
        )


def _repaired(container: Container, inventories: list[Inventory]) -> bool:
    from gpuhook.running import repair as repairs  # noqa: PLC0415 - as above

    try:
        how, count = repairs.repair(container, inventories)
    except GpuhookError as error:
        click.echo(f"{container.name[:12]}: {error}", err=True)
        return False
    click.echo(_line(container, how, count))
    return True


def _line(container: Container, how: str, count: int) -> str:
    return f"{container.name[:12]}: {count} devices allowed ({how})"

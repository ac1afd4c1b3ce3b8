"""gpuhook repair: give back GPUs to running containers that lost access to them."""

import click

from gpuhook import containers
from gpuhook.cli._output import config_option
from gpuhook.config import load
from gpuhook.errors import ContainerError


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
    chosen = running if everything else repairs.select(names, running)
    failed = []
    for container in chosen:
        how, count = repairs.repair(container, devices)
        click.echo(f"{container.name[:12]}: {count} devices allowed ({how})")
        if not count:
            failed.append(container.name)
    if failed:
        raise ContainerError(
            f"No device node is mounted in {', '.join(failed)}",
            "Start it again: its GPUs were given by somebody else than gpuhook",
        )

"""gpuhook repair: restore the GPU access of running containers."""

import click

from gpuhook.base.config.loader import load
from gpuhook.base.config.model import Config
from gpuhook.base.errors import ContainerError, GpuhookError, listed, printable
from gpuhook.core.inventory.model import Inventory
from gpuhook.monitor.vendors import survey
from gpuhook.tools.cli import _completion as completing
from gpuhook.tools.cli._containers import names_of, say_what_is_missing, title
from gpuhook.tools.cli._help import command
from gpuhook.tools.cli._output import config_option
from gpuhook.tools.running import holders
from gpuhook.tools.running import repair as repairs
from gpuhook.tools.running.holders import Container
from gpuhook.tools.running.names import Names

_SHOWN = 16  # most nodes of a container to name

# Reasons of cgroup.access.allow why a cgroup removes no access.
_NOTHING_TO_DO = {
    "no-devices": ": it has no device",
    "no-cgroups": ": this host has no device cgroups",
    "shared": ": it has no cgroup of its own",
    "no-program": ": its cgroup restricts no devices",
    "rootless": ": containers of a rootless engine are restricted only by permissions",
}


@command(
    examples={
        "gpuhook repair training": "Restore the GPU access of the container named training",
        "gpuhook repair --all": "The same for all containers",
    },
)
@click.argument("names", metavar="[CONTAINER]...", nargs=-1, shell_complete=completing.containers)
@click.option("--all", "everything", is_flag=True, help="Repair every container that has a GPU.")
@config_option
def repair(names: tuple[str, ...], everything: bool, config_path: str | None) -> None:
    """Restore the GPU access of running containers that lost it.

    Use this for "Failed to initialize NVML: Unknown Error" in a container that worked before:
    systemctl daemon-reload or docker update has removed its device rules. The container
    continues to run. It gets the devices recorded at its start, never more, and the restored
    ones are named. CONTAINER is an id, the start of an id, or the engine's name for it.
    """
    from gpuhook.core.inventory.cache import get_inventory  # noqa: PLC0415

    if bool(names) == everything:
        raise click.UsageError("Name the containers, or use only --all.")
    config = load(config_path)
    inventories, _ = survey.present(config, lambda vendor: get_inventory(config, vendor))
    running, problems = holders.running(inventories, config.state_dir)
    say_what_is_missing(problems)
    called = names_of(running)
    if everything:
        _repair_all(running, inventories, called, config)
        return
    for container in repairs.select(names, running, called):
        click.echo(_line(_title(container, called), repairs.repair(container, inventories, config)))


def _repair_all(
    running: list[Container], inventories: list[Inventory], called: Names, config: Config
) -> None:
    """Repair the containers that have a record; name those that have none."""
    if not running:
        click.echo("No running container with a GPU was found.")
    failed = [each for each in running if not _repaired(each, inventories, called, config)]
    if any(each.record is not None for each in failed):
        raise ContainerError(
            f"{len(failed)} of the containers could not be repaired",
            "The messages above say why; stop and start these containers",
        )


def _repaired(
    container: Container, inventories: list[Inventory], called: Names, config: Config
) -> bool:
    name = _title(container, called)
    try:
        done = repairs.repair(container, inventories, config)
    except GpuhookError as error:
        click.echo(f"{name}: {printable(str(error))}", err=True)
        return False
    click.echo(_line(name, done))
    return True


def _title(container: Container, called: Names) -> str:
    return title(container, called.of(container.name)[0])


def _line(name: str, done: repairs.Repaired) -> str:
    """Return a line with the access that was missing and is restored."""
    found = []
    if done.nodes:
        paths = listed([node.path for node in done.nodes], _SHOWN)
        found.append(f"access to {paths} was missing and is given back")
    if done.links:
        links = listed([f"/dev/char/{link}" for link in done.links], _SHOWN)
        found.append(f"created {links}, without which systemd would remove the access again")
    if done.limits:
        devices = listed(done.limits, _SHOWN)
        found.append(f"the memory limit on device {devices} was lost and is set again")
    if not done.lasts:
        found.append(
            f"{'' if found else 'nothing was missing, but '}the next systemctl daemon-reload "
            "removes the access, because only a hook added it: start the container with gpu-py, "
            "or in podman with a precreate hook"
        )
    why = _NOTHING_TO_DO.get(done.how.partition(":")[2], "")
    return f"{name}: {'; '.join(found) or f'nothing was missing{why}'}"

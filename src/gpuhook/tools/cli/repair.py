"""gpuhook repair: restore the GPU access of running containers."""

from typing import Any

import click

from gpuhook.base.config.loader import load
from gpuhook.base.config.model import Config
from gpuhook.base.errors import ContainerError, GpuhookError, listed, printable
from gpuhook.core.inventory.model import Inventory
from gpuhook.monitor.containers import device_users
from gpuhook.monitor.containers.device_users import RunningContainer
from gpuhook.monitor.vendors import survey
from gpuhook.tools.cli import _completion as completing
from gpuhook.tools.cli._containers import names_of, say_what_is_missing, title
from gpuhook.tools.cli._help import command
from gpuhook.tools.cli._output import config_option, format_option, print_json
from gpuhook.tools.running import repair as repairs
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
        "gpuhook repair --all --format json": "The same for programs",
    },
)
@click.argument("names", metavar="[CONTAINER]...", nargs=-1, shell_complete=completing.containers)
@click.option("--all", "everything", is_flag=True, help="Repair every container that has a GPU.")
@config_option
@format_option
def repair(
    names: tuple[str, ...], everything: bool, config_path: str | None, output_format: str
) -> None:
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
    running, problems = device_users.running(inventories, config.state_dir)
    say_what_is_missing(problems)
    called = names_of(running)
    as_json = output_format == "json"
    chosen = running if everything else repairs.select(names, running, called)
    done = []
    for container in chosen:
        one = _repaired(container, inventories, config)
        if isinstance(one, GpuhookError) and not everything and not as_json:
            raise one
        if not as_json:
            _say(_title(container, called), one)
        done.append((container, one))
    if as_json:
        found = [_to_json(container, one, called) for container, one in done]
        print_json({"containers": found})
    elif not done:
        click.echo("No running container with a GPU was found.")
    failed = [container for container, one in done if isinstance(one, GpuhookError)]
    if failed and (not everything or any(each.record is not None for each in failed)):
        raise ContainerError(
            f"{len(failed)} of the containers could not be repaired",
            "The messages above say why; stop and start these containers",
        )


def _repaired(
    container: RunningContainer, inventories: list[Inventory], config: Config
) -> repairs.RepairResult | GpuhookError:
    try:
        return repairs.repair(container, inventories, config)
    except GpuhookError as error:
        return error


def _say(name: str, done: repairs.RepairResult | GpuhookError) -> None:
    """Print the result for a container: an error on standard error."""
    if isinstance(done, GpuhookError):
        click.echo(f"{name}: {printable(str(done))}", err=True)
    else:
        click.echo(_line(name, done))


def _to_json(
    container: RunningContainer, done: repairs.RepairResult | GpuhookError, called: Names
) -> dict[str, Any]:
    """Return the result for a container, as docs/json.md describes it."""
    found: dict[str, Any] = {
        "id": container.name,
        "engine": container.engine,
        "engine_name": called.of(container.name)[0],
        "restored_nodes": [],
        "created_links": [],
        "restored_limits": [],
        "lasts": None,
        "result": "",
        "error": None,
    }
    if isinstance(done, GpuhookError):
        return {**found, "error": str(done)}
    return {
        **found,
        "restored_nodes": [node.path for node in done.nodes],
        "created_links": [f"/dev/char/{link}" for link in done.links],
        "restored_limits": [*done.memory_limits],
        "lasts": done.lasts,
        "result": done.how.partition(":")[2],
    }


def _title(container: RunningContainer, called: Names) -> str:
    return title(container, called.of(container.name)[0])


def _line(name: str, done: repairs.RepairResult) -> str:
    """Return a line with the access that was missing and is restored."""
    found = []
    if done.nodes:
        paths = listed([node.path for node in done.nodes], _SHOWN)
        found.append(f"access to {paths} was missing and is given back")
    if done.links:
        links = listed([f"/dev/char/{link}" for link in done.links], _SHOWN)
        found.append(f"created {links}, without which systemd would remove the access again")
    if done.memory_limits:
        devices = listed(done.memory_limits, _SHOWN)
        found.append(f"the memory limit on device {devices} was lost and is set again")
    if not done.lasts:
        found.append(
            f"{'' if found else 'nothing was missing, but '}the next systemctl daemon-reload "
            "removes the access, because only a hook added it: start the container with gpu-py, "
            "or in podman with a precreate hook"
        )
    why = _NOTHING_TO_DO.get(done.how.partition(":")[2], "")
    return f"{name}: {'; '.join(found) or f'nothing was missing{why}'}"

"""gpuhook list: GPUs, MIG devices, and the running containers that have them."""

import os
from typing import Any

import click

from gpuhook.cli._output import config_option, format_option, print_json, printable, table
from gpuhook.config import load
from gpuhook.inventory.cache import get_inventory
from gpuhook.inventory.model import Gpu, Inventory, Mig
from gpuhook.running.holders import WITHOUT_ROOT, Container, running, without_record

_SHORT = 12  # characters of a container's id, as Docker prints it


@click.command("list", short_help="Show the GPUs and which container has which.")
@click.option("--files", is_flag=True, help="Also list the driver's files.")
@config_option
@format_option
def list_(files: bool, config_path: str | None, output_format: str) -> None:
    """Show the GPUs, their MIG devices, and which running container has which.

    Without root only your own containers are seen.
    """
    config = load(config_path)
    inventory = get_inventory(config)
    containers = running(inventory, config.state_dir)
    if os.geteuid() != 0:
        click.echo(WITHOUT_ROOT, err=True)
    if output_format == "json":
        print_json(_as_json(inventory, containers))
        return
    click.echo(_gpus(inventory, containers))
    looked_at = [_name(each) for each in without_record(containers)]
    if looked_at:
        click.echo(
            f"\nWithout a record, so told by the nodes that they have: {', '.join(looked_at)}"
        )
    if files:
        rows = [(file.kind, file.capability or "-", file.path) for file in inventory.files]
        click.echo("\n" + table(("KIND", "CAPABILITY", "PATH"), rows))


def users_of_gpu(inventory: Inventory, gpu: Gpu, containers: list[Container]) -> list[Container]:
    """Return the containers that have the GPU as a whole, not just a MIG device of it."""
    node = inventory.node(f"/dev/nvidia{gpu.minor}")
    if node is None:
        return []
    users = [each for each in containers if (node.major, node.minor) in each.nodes]
    of_mig = [user for mig in gpu.mig for user in users_of_mig(inventory, mig, containers)]
    return [user for user in users if user not in of_mig]


def users_of_mig(inventory: Inventory, mig: Mig, containers: list[Container]) -> list[Container]:
    """Return the containers that have a MIG device: both nodes that guard it."""
    guards = set()
    for cap in (mig.gi_cap, mig.ci_cap):
        node = inventory.node(f"/dev/nvidia-caps/nvidia-cap{cap}")
        if node is None:
            return []
        guards.add((node.major, node.minor))
    return [each for each in containers if guards <= each.nodes]


def _gpus(inventory: Inventory, containers: list[Container]) -> str:
    rows: list[tuple[object, ...]] = []
    for gpu in inventory.gpus:
        users = _names(users_of_gpu(inventory, gpu, containers))
        rows.append((gpu.index, gpu.name, gpu.uuid, users))
        for mig in gpu.mig:
            users = _names(users_of_mig(inventory, mig, containers))
            rows.append((f"{gpu.index}:{mig.index}", mig.name, mig.uuid, users))
    return table(("INDEX", "NAME", "UUID", "CONTAINERS"), rows) if rows else "No GPU."


def _names(containers: list[Container]) -> str:
    return ", ".join(map(_name, containers)) or "-"


def _name(container: Container) -> str:
    """Return what to call a container: by Kubernetes' names where it has any, else by its id."""
    if container.pod:
        words = (container.namespace, container.pod, container.container)
        return printable("/".join(word for word in words if word))
    short = container.name[:_SHORT] if container.engine else container.name
    return printable(f"{container.engine}:{short}" if container.engine else short)


def _as_json(inventory: Inventory, containers: list[Container]) -> dict[str, Any]:
    gpus = []
    for gpu in inventory.gpus:
        entry = gpu.to_json()
        entry["containers"] = [each.name for each in users_of_gpu(inventory, gpu, containers)]
        for mig, description in zip(gpu.mig, entry["mig"], strict=True):
            users = users_of_mig(inventory, mig, containers)
            description["containers"] = [each.name for each in users]
        gpus.append(entry)
    return {
        "gpus": gpus,
        "files": [file.to_json() for file in inventory.files],
        "containers": [each.to_json() for each in containers],
    }

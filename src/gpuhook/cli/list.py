"""gpuhook list: the machine's devices, and the running containers that have them."""

import os
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import click

from gpuhook.cli._help import command
from gpuhook.cli._output import (
    config_option,
    format_option,
    print_json,
    printable,
    raise_last,
    table,
)
from gpuhook.config import load
from gpuhook.inventory.cache import get_inventory
from gpuhook.inventory.model import Device, Inventory
from gpuhook.running.holders import WITHOUT_ROOT, Container, running, without_record
from gpuhook.vendors import seam

_SHORT = 12  # characters of a container's id, as Docker prints it


@command(
    "list",
    examples={
        "gpuhook list": "Show the devices, and which container has which",
        "gpuhook list --format json": "The same for programs",
    },
)
@click.option("--files", is_flag=True, help="Also list the driver's files.")
@config_option
@format_option
def list_(files: bool, config_path: str | None, output_format: str) -> None:
    """Show the machine's GPUs and other devices, and which running container has which.

    Without root only your own containers are seen.
    """
    config = load(config_path)
    inventories, failed = seam.present(config, lambda vendor: get_inventory(config, vendor))
    containers = running(inventories, config.state_dir)
    if os.geteuid() != 0:
        click.echo(WITHOUT_ROOT, err=True)
    if output_format == "json":
        print_json(_as_json(inventories, containers))
        raise_last(failed)
        return
    known = seam.known(config)
    shown = [_devices(each, known[each.vendor], containers) for each in inventories]
    click.echo("\n\n".join(shown))
    of_documents = [(name, _name(each)) for each in containers for name in each.cdi_devices]
    if of_documents:
        click.echo("\n" + table(("CDI DEVICE", "CONTAINER"), sorted(of_documents)))
    looked_at = [_name(each) for each in without_record(containers)]
    if looked_at:
        click.echo(
            f"\nWithout a record, so told by the nodes that they have: {', '.join(looked_at)}"
        )
    if files:
        every = [file for inventory in inventories for file in inventory.files]
        rows = [(file.kind, file.capability or "-", file.path) for file in every]
        click.echo("\n" + table(("KIND", "CAPABILITY", "PATH"), rows))
    raise_last(failed)


def users(inventory: Inventory, device: Device, containers: list[Container]) -> list[Container]:
    """Return the containers that have a device as a whole, not just a part of it."""
    found = _holders(inventory, device, containers)
    parts = [part for part in inventory.devices if part.parent == device.id]
    of_parts = [user for part in parts for user in _holders(inventory, part, containers)]
    return [user for user in found if user not in of_parts]


def _holders(
    inventory: Inventory, device: Device, containers: Iterable[Container]
) -> list[Container]:
    """Return the containers that have all nodes of a device."""
    nodes = [inventory.node(path) for path in device.nodes]
    if not nodes or None in nodes:
        return []
    wanted = {node.numbers for node in nodes if node is not None}
    return [each for each in containers if wanted <= each.nodes]


def _devices(inventory: Inventory, names: ModuleType, containers: list[Container]) -> str:
    rows = [
        (device.label, device.model, device.id, _names(users(inventory, device, containers)))
        for device in inventory.devices
    ]
    header = ("INDEX", "NAME", names.ID_TITLE, "CONTAINERS")
    return table(header, rows) if rows else f"No {names.NOUN}."


def _names(containers: list[Container]) -> str:
    return ", ".join(map(_name, containers)) or "-"


def _name(container: Container) -> str:
    """Return what to call a container: by Kubernetes' names where it has any, else by its id."""
    if container.pod:
        words = (container.namespace, container.pod, container.container)
        return printable("/".join(word for word in words if word))
    short = container.name[:_SHORT] if container.engine else container.name
    return printable(f"{container.engine}:{short}" if container.engine else short)


def _as_json(inventories: list[Inventory], containers: list[Container]) -> dict[str, Any]:
    """Return what each vendor has, the names of its devices' containers added, and all those."""
    found: dict[str, Any] = {}
    for inventory in inventories:
        by_id = {
            device.id: [each.name for each in users(inventory, device, containers)]
            for device in inventory.devices
        }
        for key, devices in inventory.listing(by_id).items():
            found[key] = [*found.get(key, ()), *devices]
    return {
        "gpus": [],
        **found,
        "files": [file.to_json() for inventory in inventories for file in inventory.files],
        "containers": [each.to_json() for each in containers],
    }

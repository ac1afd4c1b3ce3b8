"""gpuhook list: the host's devices, and the running containers that use them."""

import os
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import click

from gpuhook.base.config.loader import load
from gpuhook.base.sizes import amount
from gpuhook.core.inventory.cache import get_inventory
from gpuhook.core.inventory.model import Inventory
from gpuhook.core.inventory.selection import fallen_off
from gpuhook.monitor.containers import memory
from gpuhook.monitor.containers.device_users import RunningContainer, running, whole_nodes
from gpuhook.monitor.vendors import survey
from gpuhook.tools import extensions
from gpuhook.tools.cli import _containers, _device_json
from gpuhook.tools.cli._help import command
from gpuhook.tools.cli._output import config_option, format_option, print_json, raise_last
from gpuhook.tools.running import docker_inspect
from gpuhook.tools.running.names import Names
from gpuhook.vendors import registry

_LESS_SURE = {
    "nodes": "Without a record, recognised by their device nodes",
    "engine": "From the options that Docker reports for them",
}


@command(
    "list",
    examples={
        "gpuhook list": "Show the devices and the containers that use them",
        "gpuhook list --format json": "The same for programs",
    },
)
@click.option("--files", is_flag=True, help="Also list the driver's files.")
@_containers.pod_resources_option
@config_option
@format_option
def list_(files: bool, pod_resources: str, config_path: str | None, output_format: str) -> None:
    """List this host's GPUs and other devices, and the running containers that use them.

    Without root, only your own containers are listed, and those of a Docker that you have access
    to. A question mark means that other containers may use the device.
    """
    config = load(config_path)
    inventories, failed = survey.present(config, lambda vendor: get_inventory(config, vendor))
    containers, problems = running(inventories, config.state_dir)
    containers = [*containers, *docker_inspect.asked(config, inventories, containers)]
    nameless = ""
    if namer := extensions.module("pod-names"):
        containers, nameless = namer.with_pods(containers, inventories, config, pod_resources)
    _containers.say_what_is_missing([*problems, *([nameless] if nameless else [])])
    names = _containers.names_of(containers)
    used, unknown = memory.look(containers, inventories, config)
    if unknown:
        _containers.say_what_is_missing([unknown])
    if output_format == "json":
        is_whole = not problems and os.geteuid() == 0
        print_json({**_as_json(inventories, containers, names, used), "complete": is_whole})
    else:
        _show(inventories, registry.all_vendors(config), containers, names)
        _show_memory(inventories, containers, names, used)
        if files:
            every = [file for inventory in inventories for file in inventory.files]
            rows = [(file.kind, file.capability or "-", file.path) for file in every]
            _table(("KIND", "CAPABILITY", "PATH"), rows, less=("CAPABILITY", "KIND"))
    raise_last(failed)


def _show(
    inventories: list[Inventory],
    vendors: Mapping[str, ModuleType],
    containers: list[RunningContainer],
    names: Names,
) -> None:
    """Print each vendor's devices, and further facts on the containers."""
    titles = {id(each): _containers.title(each, names.of(each.name)[0]) for each in containers}
    unused = "?" if os.geteuid() else "-"
    for number, inventory in enumerate(inventories):
        rows = _rows(inventory, containers, titles, unused)
        vendor = vendors[inventory.vendor]
        if number:
            click.echo()
        models = [device.model for device in inventory.devices] or [vendor.NOUN]
        if not all(vendor.TITLE in model for model in models):
            click.echo(f"{vendor.TITLE}:")
        header = ("INDEX", "STATE", "NAME", vendor.ID_TITLE, "CONTAINERS")
        _table(header, rows, f"No {vendor.NOUN}.", less=("NAME", vendor.ID_TITLE), blank=False)
        if inventory.lost:
            _say(f"{fallen_off(inventory.lost, vendor)}.")
        for device in inventory.devices:
            if device.state:
                _say(f"{vendor.NOUN} {device.label} can't be used: {device.state}.")
    of_documents = [(name, titles[id(each)]) for each in containers for name in each.cdi_devices]
    if of_documents:
        _table(("CDI DEVICE", "CONTAINER"), sorted(of_documents))
    for known_from, text in _LESS_SURE.items():
        which = [titles[id(each)] for each in containers if each.known_from == known_from]
        if which:
            click.echo()
            _say(f"{text}: {', '.join(which)}")


def _rows(
    inventory: Inventory, containers: list[RunningContainer], titles: Mapping[int, str], unused: str
) -> list[list[str]]:
    """Return the row of each device, and of lost ones, of which only the index is known."""
    users_of = _users(inventory, containers)
    rows = [
        [
            device.label,
            "unusable" if device.state else "",
            device.model,
            device.id,
            ", ".join(titles[id(each)] for each in users_of[device.id]) or unused,
        ]
        for device in inventory.devices
    ]
    for index in inventory.lost:
        before = [row for row in rows if _number(row[0]) < index]
        rows.insert(len(before), [str(index), "lost", "-", "-", "?"])
    return rows


def _number(label: str) -> int:
    """Return the number of a device, or of the one that it is a part of, by its label."""
    first = label.partition(":")[0]
    return int(first) if first.isascii() and first.isdecimal() else -1


def _show_memory(
    inventories: list[Inventory],
    containers: list[RunningContainer],
    names: Names,
    used: memory.Found,
) -> None:
    """Print the containers' memory limits, and the memory used according to their cgroups."""
    rows = []
    labels = {device.id: device.label for each in inventories for device in each.devices}
    for container in containers:
        name = _containers.title(container, names.of(container.name)[0])
        for (holder, device), found in used.items():
            if holder == container.name:
                limit = "-" if found.limit is None else amount(found.limit)
                mib = f"{found.used >> 20}MiB"
                rows.append((name, labels.get(device, device), mib, limit, found.source))
    if rows:
        header = ("CONTAINER", "INDEX", "MEMORY USED", "LIMIT", "SOURCE")
        _table(header, rows, less=("SOURCE", "LIMIT"))


def _table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    none: str = "",
    *,
    less: Sequence[str] = (),
    blank: bool = True,
) -> None:
    """Print a table, or ``none`` if it has no rows, after an empty line if ``blank``.

    The column STATE is left out if no row has one.
    """
    from gpuhook.tools.cli import _screen  # noqa: PLC0415 - costs a tenth of a second

    if blank:
        click.echo()
    if none and not rows:
        click.echo(none)
        return
    shown = [
        place
        for place, title in enumerate(header)
        if title != "STATE" or any(row[place] for row in rows)
    ]
    cells = [
        [
            _screen.text(row[place] or "-", _screen.BAD if header[place] == "STATE" else "")
            for place in shown
        ]
        for row in rows
    ]
    titles = [header[place] for place in shown]
    _screen.show(_screen.table(titles, cells, less=less, cut="NAME", wrap="CONTAINERS"))


def _say(sentence: str) -> None:
    """Print a sentence, wrapped on a terminal."""
    from gpuhook.tools.cli import _screen  # noqa: PLC0415 - costs a tenth of a second

    _screen.show(_screen.text(sentence))


def _users(
    inventory: Inventory, containers: list[RunningContainer]
) -> dict[str, list[RunningContainer]]:
    """Return the containers that have each whole device, not only a part of it."""
    holders: dict[str, list[RunningContainer]] = {device.id: [] for device in inventory.devices}
    for name, wanted in whole_nodes(inventory).items():
        holders[name] = [each for each in containers if wanted <= each.nodes]
    of_parts: dict[str, set[int]] = {}
    for device in inventory.devices:
        if device.parent:
            of_parts.setdefault(device.parent, set()).update(map(id, holders[device.id]))
    return {
        device: [each for each in found if id(each) not in of_parts.get(device, ())]
        for device, found in holders.items()
    }


def _as_json(
    inventories: list[Inventory],
    containers: list[RunningContainer],
    names: Names,
    used: memory.Found,
) -> dict[str, Any]:
    """Return each vendor's devices with the ids of their containers, and all the containers.

    ``gpus`` are NVIDIA's once more, under the keys of earlier releases.
    """
    old: dict[str, Any] = {}
    devices = []
    for inventory in inventories:
        users_of = _users(inventory, containers)
        by_id = {device: [each.name for each in users] for device, users in users_of.items()}
        old.update(inventory.listing(by_id))
        devices += [
            {**each, "containers": by_id[each["id"]]} for each in _device_json.described(inventory)
        ]
    return {
        "gpus": old.get("gpus", []),
        "devices": devices,
        "lost": _device_json.lost(inventories),
        "files": [file.to_json() for inventory in inventories for file in inventory.files],
        "containers": [
            {
                **each.to_json(),
                "id": each.name,
                "engine_name": names.of(each.name)[0],
                "memory": [
                    _memory_json(device, found)
                    for (holder, device), found in used.items()
                    if holder == each.name
                ],
            }
            for each in containers
        ],
    }


def _memory_json(device: str, found: memory.Memory) -> dict[str, Any]:
    return {
        "device": device,
        "memory_used_bytes": found.used,
        "memory_limit_bytes": found.limit,
        "memory_source": found.source,
        **found._asdict(),
    }

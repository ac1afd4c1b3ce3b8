"""gpuhook info: the driver, the GPUs and what of the driver's files was found."""

from collections import Counter

import click

from gpuhook.cli._output import config_option, format_option, print_json, table
from gpuhook.config import load
from gpuhook.inventory.model import Inventory
from gpuhook.vendors.nvidia.discover import discover


@click.command()
@config_option
@format_option
def info(config_path: str | None, output_format: str) -> None:
    """Show the driver and the GPUs of this machine, as NVML and the driver root tell."""
    inventory = discover(load(config_path))
    if output_format == "json":
        print_json(inventory.to_json())
    else:
        click.echo(_text(inventory))


def _text(inventory: Inventory) -> str:
    kinds = Counter(file.kind for file in inventory.files)
    found = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    lines = [
        f"Driver root:     {inventory.root}",
        f"Driver version:  {inventory.driver_version}",
        f"CUDA version:    {inventory.cuda_version}",
        f"Driver files:    {found or 'none'}",
        f"Device nodes:    {', '.join(node.path for node in inventory.nodes) or 'none'}",
    ]
    lines += [f"GPU {index}: lost (fallen off the bus)" for index in inventory.lost]
    if inventory.gpus:
        lines += ["", _gpu_table(inventory)]
    else:
        lines += ["", "No GPU."]
    return "\n".join(lines)


def _gpu_table(inventory: Inventory) -> str:
    rows: list[tuple[object, ...]] = []
    for gpu in inventory.gpus:
        rows.append((gpu.index, gpu.minor, gpu.name, gpu.architecture, gpu.pci_bus_id, gpu.uuid))
        rows += [(f"{gpu.index}:{mig.index}", "", mig.name, "", "", mig.uuid) for mig in gpu.mig]
    return table(("INDEX", "MINOR", "NAME", "ARCH", "BUS ID", "UUID"), rows)

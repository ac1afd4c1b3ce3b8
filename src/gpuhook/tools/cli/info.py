"""gpuhook info: each driver, its devices, and its files found on the host."""

from collections import Counter
from types import ModuleType
from typing import Any

import click

from gpuhook.base.config.loader import load
from gpuhook.base.config.model import Config
from gpuhook.core import contract
from gpuhook.core.inventory.model import Inventory
from gpuhook.monitor.vendors import survey
from gpuhook.tools.cli import _device_json
from gpuhook.tools.cli._help import command
from gpuhook.tools.cli._output import config_option, format_option, print_json, raise_last
from gpuhook.vendors import registry

# Columns to drop when space is short, in this order.
_LESS = ("ARCH", "MINOR", "MODULE", "CORES", "BUS ID")


@command(
    examples={
        "gpuhook info": "Show each driver and its devices",
        "gpuhook info --format json": "The same for programs",
    },
)
@config_option
@format_option
def info(config_path: str | None, output_format: str) -> None:
    """Show the drivers and the devices of this host, detected now."""
    config = load(config_path)
    inventories, failed = survey.present(config, lambda vendor: vendor.discover(config))
    if output_format == "json":
        print_json(_as_json(inventories))
    else:
        vendors = registry.all_vendors(config)
        for number, each in enumerate(inventories):
            _show(each, vendors[each.vendor], config, blank=number > 0)
    raise_last(failed)


def _as_json(inventories: list[Inventory]) -> dict[str, Any]:
    """Return drivers, devices and files, and the keys of earlier releases.

    Those are the first vendor's inventory at the top, and the others' in ``others``.
    """
    first, *others = [inventory.to_json() for inventory in inventories]
    return {
        **first,
        **({"others": others} if others else {}),
        "drivers": _device_json.drivers(inventories),
        "devices": [each for one in inventories for each in _device_json.described(one)],
    }


def _show(inventory: Inventory, vendor: ModuleType, config: Config, *, blank: bool) -> None:
    """Print one vendor's driver and devices, after an empty line if ``blank``."""
    from gpuhook.monitor import memory_limit_support  # noqa: PLC0415 - --help needs none of it
    from gpuhook.tools.cli import _screen  # noqa: PLC0415 - costs a tenth of a second

    lacking = memory_limit_support.what_it_takes(contract.load(vendor), inventory, config)
    kinds = Counter(file.kind for file in inventory.files)
    found = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    facts = (
        ("Driver root", inventory.root),
        ("Driver version", inventory.version),
        ("Driver files", found or "none"),
        ("Device nodes", ", ".join(node.path for node in inventory.nodes) or "none"),
        *inventory.facts(),
        ("Memory limits", "unavailable: " + lacking.cause if lacking else "available"),
    )
    header, rows = inventory.table()
    if blank:
        click.echo()
    _screen.show(_screen.facts([(title, text, "") for title, text in facts]))
    click.echo()
    if rows:
        less = [title for title in _LESS if title != vendor.ID_TITLE]
        less += ["NAME", vendor.ID_TITLE]
        _screen.show(_screen.table(header, rows, less=less, cut="NAME"))
    else:
        click.echo(f"No {vendor.NOUN}.")

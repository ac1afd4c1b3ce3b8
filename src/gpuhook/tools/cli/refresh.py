"""gpuhook refresh: save the device inventory, so that no container start has to detect devices."""

from typing import Any

import click

from gpuhook.base.config.loader import load
from gpuhook.base.errors import DriverError
from gpuhook.core import contract, dev_char
from gpuhook.core.inventory import cache
from gpuhook.core.inventory.model import Inventory
from gpuhook.monitor.vendors import survey
from gpuhook.prefork import launcher_cache
from gpuhook.tools.cli._help import command
from gpuhook.tools.cli._output import config_option, format_option, print_json, raise_last, say


@command(
    examples={
        "gpuhook refresh": "Detect the devices again after a change",
        "gpuhook refresh --if-stale": "Do so only if the saved inventory is out of date (timers)",
    },
)
@config_option
@click.option("--if-stale", is_flag=True, help="Do nothing if the saved inventory is up to date.")
@click.option("--verbose", is_flag=True, help="Print a line for each new link, too.")
@format_option
def refresh(config_path: str | None, if_stale: bool, verbose: bool, output_format: str) -> None:
    """Save this host's device inventory, so that no container start has to query a driver.

    Also saves the settings that gpu-py's launcher needs, and creates the links in /dev/char
    that systemd needs for containers to keep their GPUs across systemctl daemon-reload. Needs
    root. Without this command, the first container after a change starts more slowly, because
    it queries the driver itself.
    """
    config = load(config_path)
    launcher_cache.save(config.path)

    def inventory_of(vendor: contract.Vendor) -> Inventory:
        found = cache.saved(config, vendor) if if_stale else None
        return found or cache.refresh(config, vendor)

    inventories, failed = survey.present(config, inventory_of)
    saved = [(inventory, _dev_char_links(inventory)) for inventory in inventories]
    if output_format == "json":
        print_json([_described(inventory, links) for inventory, links in saved])
    for inventory, links in saved if output_format == "text" else ():
        said = f"{inventory.sentence()}, {len(inventory.files)} files: saved in {config.state_dir}"
        say(f"{said}, {len(links)} links created in /dev/char" if links else said)
        for link in links if verbose else ():
            say(f"Created the link /dev/char/{link}")
    raise_last(failed)


def _described(inventory: Inventory, links: list[str]) -> dict[str, Any]:
    """Return an inventory's counts and new links for JSON."""
    return {
        "vendor": inventory.vendor,
        "root": inventory.root,
        "driver_version": inventory.version,
        "devices": len(inventory.devices),
        "files": len(inventory.files),
        "links": [f"/dev/char/{link}" for link in links],
    }


def _dev_char_links(inventory: Inventory) -> list[str]:
    try:
        return dev_char.make_links(inventory.nodes, inventory.root)
    except OSError as error:
        raise DriverError(
            f"{error.filename2 or error.filename} can't be created: {error.strerror}",
            "Run this as root, where /dev is writable",
        ) from None

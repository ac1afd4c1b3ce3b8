"""gpuhook refresh: look at the machine now, so that no container start has to."""

import click

from gpuhook.ground.config.loader import load
from gpuhook.ground.errors import DriverError
from gpuhook.standby import launcher_files
from gpuhook.start import contract, dev_char
from gpuhook.start.inventory import cache
from gpuhook.start.inventory.model import Inventory
from gpuhook.tools.cli._help import command
from gpuhook.tools.cli._output import config_option, raise_last, say
from gpuhook.tools.vendors import survey


@command(
    examples={
        "gpuhook refresh": "Look at the machine again after a change",
        "gpuhook refresh --if-stale": "Do so where what is saved is out of date, from a timer",
    },
)
@config_option
@click.option("--if-stale", is_flag=True, help="Do nothing while what is saved is up to date.")
def refresh(config_path: str | None, if_stale: bool) -> None:
    """Save which devices this machine has, so that no container start has to ask a driver.

    Also saves what gpu-py's launcher must know of the configuration, and makes the links in
    /dev/char that systemd needs for a container to keep its GPUs across systemctl
    daemon-reload. Needs root. Without this, the first container after a change
    starts more slowly, because it asks the driver itself.
    """
    config = load(config_path)
    launcher_files.save(config.path)

    def inventory_of(vendor: contract.Vendor) -> Inventory:
        found = cache.saved(config, vendor) if if_stale else None
        return found or cache.refresh(config, vendor)

    inventories, failed = survey.present(config, inventory_of)
    for inventory in inventories:
        say(f"{inventory.sentence()}, {len(inventory.files)} files: saved in {config.state_dir}")
        for link in _dev_char_links(inventory):
            say(f"Made the link {link}")
    raise_last(failed)


def _dev_char_links(inventory: Inventory) -> list[str]:
    try:
        return dev_char.make_links(inventory.nodes, inventory.root)
    except OSError as error:
        raise DriverError(
            f"{error.filename2 or error.filename} can't be made: {error.strerror}",
            "Run this as root, where /dev can be written to",
        ) from None

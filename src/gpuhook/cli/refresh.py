"""gpuhook refresh: look at the machine now, so that no container start has to."""

import click

from gpuhook import store
from gpuhook.cli._output import config_option
from gpuhook.config import load


@click.command()
@config_option
@click.option("--if-stale", is_flag=True, help="Do nothing while the saved inventory is right.")
def refresh(config_path: str | None, if_stale: bool) -> None:
    """Save what this machine has to give, so that no container start has to ask NVML.

    Needs root. The next container after a change would do the same by itself, at the cost
    of the time that starting NVML takes.
    """
    config = load(config_path)
    inventory = store.saved(config) if if_stale else None
    if inventory is None:
        inventory = store.refresh(config)
    click.echo(
        f"Driver {inventory.driver_version}, {len(inventory.gpus)} GPUs, "
        f"{len(inventory.files)} files: saved in {config.state_dir}"
    )

"""gpuhook cdi: the documents by which engines themselves give devices to containers."""

import click

from gpuhook.cli.cdi_folders import list_, validate
from gpuhook.cli.cdi_generate import generate, transform
from gpuhook.cli.cdi_refresh import refresh


@click.group()
def cdi() -> None:
    """Make CDI documents, and look at those that are there."""


for command in (generate, list_, refresh, transform, validate):
    cdi.add_command(command)

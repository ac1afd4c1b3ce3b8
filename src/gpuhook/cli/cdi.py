"""gpuhook cdi: the documents by which engines themselves give devices to containers."""

import click

from gpuhook.cli.cdi_folders import list_, validate


@click.group()
def cdi() -> None:
    """Make CDI documents, and look at those that are there."""


cdi.add_command(list_)
cdi.add_command(validate)

"""gpuhook cdi: the documents by which engines themselves give devices to containers."""

import click

from gpuhook.cli.cdi_generate import generate, transform


@click.group()
def cdi() -> None:
    """Make CDI documents, and look at those that are there."""


cdi.add_command(generate)
cdi.add_command(transform)

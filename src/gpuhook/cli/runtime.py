"""``gpuhook runtime configure``: where hands that know nvidia-ctk look for ``configure``."""

import click

from gpuhook.cli.configure import configure


@click.group()
def runtime() -> None:
    """Hold ``configure``, as nvidia-ctk does."""


runtime.add_command(configure)

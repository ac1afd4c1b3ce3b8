"""gpuhook cdi: the documents by which engines themselves give devices to containers."""

from gpuhook.cli._help import group
from gpuhook.cli.cdi_folders import list_, validate
from gpuhook.cli.cdi_generate import generate, transform
from gpuhook.cli.cdi_refresh import refresh


@group()
def cdi() -> None:
    """Make CDI documents, and check those that are there."""


for command in (generate, list_, refresh, transform, validate):
    cdi.add_command(command)

"""gpuhook cdi: the documents by which engines themselves give devices to containers."""

from gpuhook.tools.cli._help import group
from gpuhook.tools.cli.cdi_folders import list_, validate
from gpuhook.tools.cli.cdi_generate import generate, transform
from gpuhook.tools.cli.cdi_refresh import refresh


@group()
def cdi() -> None:
    """Make CDI documents, and check those that are there."""


for command in (generate, list_, refresh, transform, validate):
    cdi.add_command(command)

"""gpuhook cdi: CDI specs, with which engines add devices to containers themselves."""

from gpuhook.tools.cli._help import group
from gpuhook.tools.cli.cdi_folders import list_, validate
from gpuhook.tools.cli.cdi_generate import generate, transform
from gpuhook.tools.cli.cdi_refresh import refresh


@group()
def cdi() -> None:
    """Generate and check CDI specs for container engines."""


for command in (generate, list_, refresh, transform, validate):
    cdi.add_command(command)

"""``gpuhook runtime configure``: where hands that know nvidia-ctk look for ``configure``."""

from gpuhook.cli._help import group
from gpuhook.cli.configure import configure


@group()
def runtime() -> None:
    """Have ``configure`` where nvidia-ctk has it."""


runtime.add_command(configure)

"""``gpuhook runtime configure``: where hands that know nvidia-ctk look for ``configure``."""

from gpuhook.cli._help import group
from gpuhook.cli.configure import configure


@group()
def runtime() -> None:
    """Do what ``configure`` does, by the name it has in nvidia-ctk."""


runtime.add_command(configure)

"""``gpuhook runtime configure``: where hands that know nvidia-ctk look for ``configure``."""

from gpuhook.tools.cli._help import group
from gpuhook.tools.cli.configure import configure


@group()
def runtime() -> None:
    """Do what ``configure`` does, by the name it has in nvidia-ctk."""


runtime.add_command(configure)

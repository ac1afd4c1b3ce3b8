"""Shared functions of nvidia-ctk's commands: messages, and options with lists."""

from collections.abc import Iterable

import click

from gpuhook.base.errors import printable

PROGRAM = "nvidia-ctk"
# The version whose command lines are served. Scripts compare it with a minimum, such as 1.14.
SERVED_VERSION = "1.20.0"


def say(text: str) -> None:
    """Print a line to standard error, unless --quiet forbids it."""
    if not click.get_current_context().find_root().params["quiet"]:
        click.echo(f"{PROGRAM}: {printable(text)}", err=True)


def config_path() -> str | None:
    """Return the configuration file that --config names before the command."""
    path: str | None = click.get_current_context().find_root().params["config_path"]
    return path


def items(values: Iterable[str]) -> tuple[str, ...]:
    """Return the items of repeatable options with comma-separated values."""
    every = (item.strip() for value in values for item in value.split(","))
    return tuple(dict.fromkeys(item for item in every if item))

"""Options --format and --config, and printing, shared by the commands."""

import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

from gpuhook.base.errors import GpuhookError, printable

Command = TypeVar("Command", bound=Callable[..., Any])


def format_option(command: Command) -> Command:
    """Add --format text|json."""
    return click.option(
        "--format",
        "output_format",
        type=click.Choice(["text", "json"]),
        default="text",
        show_default=True,
        help="Output format.",
    )(command)


def config_option(command: Command) -> Command:
    """Add --config FILE."""
    return click.option(
        "--config",
        "config_path",
        metavar="FILE",
        help="Configuration file.  [default: $GPUHOOK_CONFIG or /etc/gpuhook/config.toml]",
    )(command)


def print_json(value: object) -> None:
    """Print a value as indented JSON."""
    click.echo(json.dumps(value, indent=2))


def say(text: str, *, err: bool = False) -> None:
    """Print a line with untrusted names escaped; ``err`` selects standard error."""
    click.echo(printable(text), err=err)  # protects: said-line


def warn(text: str) -> None:
    """Print a warning to standard error."""
    say(f"gpuhook: warning: {text}", err=True)


def raise_last(errors: Sequence[GpuhookError]) -> None:
    """Print the errors of a command and raise the last one, if there are any."""
    for error in errors[:-1]:
        click.echo(f"gpuhook: {error}", err=True)
    if errors:
        raise errors[-1]

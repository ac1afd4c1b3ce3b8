"""All commands and groups of a command line."""

from collections.abc import Iterator

import click

from gpuhook.tools.cli._help import Command

WIDTH = 78  # columns of the help text


def commands(
    command: click.Command, name: str, parent: click.Context | None = None
) -> Iterator[tuple[str, Command, click.Context]]:
    """Yield the call, the object and the context of each command and group."""
    width = None if parent else WIDTH
    context = click.Context(command, info_name=name, parent=parent, terminal_width=width)
    assert isinstance(command, Command), "gpuhook.tools.cli._help makes every command"
    yield context.command_path, command, context
    if isinstance(command, click.Group):
        for inner in command.list_commands(context):
            found = command.get_command(context, inner)
            assert found is not None
            yield from commands(found, inner, context)

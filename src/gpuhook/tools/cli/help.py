"""gpuhook help COMMAND: the same text as gpuhook COMMAND --help."""

import click
from click.shell_completion import CompletionItem

from gpuhook.tools.cli._help import command, no_such_command


def _complete(ctx: click.Context, _: click.Parameter, typed: str) -> list[CompletionItem]:
    try:
        found, inner = _find(ctx.find_root(), ctx.params.get("words") or ())
    except click.UsageError:
        return []
    names = found.list_commands(inner) if isinstance(found, click.Group) else []
    return [CompletionItem(name) for name in names if name.startswith(typed)]


@command(
    "help",
    examples={
        "gpuhook help install": "Show the same as gpuhook install --help",
        "gpuhook help cdi generate": "The same for a command within a group",
    },
)
@click.argument("words", metavar="[COMMAND]...", nargs=-1, shell_complete=_complete)
@click.pass_context
def help_(ctx: click.Context, words: tuple[str, ...]) -> None:
    """Show the help of COMMAND, or without COMMAND the list of commands."""
    found, inner = _find(ctx.find_root(), words)
    click.echo(found.get_help(inner))


def _find(root: click.Context, words: tuple[str, ...]) -> tuple[click.Command, click.Context]:
    """Return the command named by words; UsageError if there is none."""
    found, inner = root.command, root
    for word in words:
        if not isinstance(found, click.Group):
            raise click.UsageError(f"{inner.command_path} has no commands of its own.", inner)
        next_one = found.get_command(inner, word)
        if next_one is None:
            raise no_such_command(found, inner, word)
        inner = click.Context(next_one, info_name=word, parent=inner)
        found = next_one
    return found, inner

"""gpuhook completion: a shell's script to complete gpuhook's commands and options."""

import click
from click.shell_completion import get_completion_class

from gpuhook.tools.cli._completion import register
from gpuhook.tools.cli._help import command

SHELLS = ("bash", "zsh", "fish")


@command(
    examples={
        "gpuhook completion bash > /etc/bash_completion.d/gpuhook": "Install it for every user",
        "gpuhook completion fish > ~/.config/fish/completions/gpuhook.fish": "For yourself",
    },
)
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print a shell's script to complete commands, options and their values.

    It also completes keys of config.toml, devices and containers. Start a new shell, or source
    the file, to use it.
    """
    click.echo(script(shell, ctx.find_root().command))


def script(shell: str, command: click.Command) -> str:
    """Return a shell's script to complete gpuhook's command line."""
    register()
    kind = get_completion_class(shell)
    if kind is None:
        raise click.ClickException(f"This click has no completion for {shell}.")
    made = kind(command, {}, "gpuhook", "_GPUHOOK_COMPLETE")
    # Only the template: source() would run bash to read its version.
    return made.source_template % made.source_vars()

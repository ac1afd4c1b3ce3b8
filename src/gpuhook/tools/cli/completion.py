"""gpuhook completion: the script by which a shell completes gpuhook's commands and options."""

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
    """Print the script by which a shell completes commands, options and their values.

    It also completes keys of config.toml, devices and containers. Begin a new shell, or read the
    file with source, for it to count.
    """
    click.echo(script(shell, ctx.find_root().command))


def script(shell: str, command: click.Command) -> str:
    """Return the script that completes the words of gpuhook's command line in a shell."""
    register()
    kind = get_completion_class(shell)
    if kind is None:
        raise click.ClickException(f"This click has no completion for {shell}.")
    made = kind(command, {}, "gpuhook", "_GPUHOOK_COMPLETE")
    # The template alone: source() would look for a bash to ask for its version.
    return made.source_template % made.source_vars()

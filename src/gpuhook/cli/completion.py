"""gpuhook completion: the script by which a shell completes gpuhook's commands and options."""

import click
from click.shell_completion import get_completion_class

from gpuhook.cli._completion import register
from gpuhook.cli._help import command

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
    register()
    kind = get_completion_class(shell)
    if kind is None:
        raise click.ClickException(f"This click has no completion for {shell}.")
    script = kind(ctx.find_root().command, {}, "gpuhook", "_GPUHOOK_COMPLETE")
    # The template alone: source() would look for a bash to ask for its version.
    click.echo(script.source_template % script.source_vars())

"""gpuhook completion: the script by which a shell completes gpuhook's commands and options."""

import click
from click.shell_completion import get_completion_class

SHELLS = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the script that completes gpuhook's words in a shell.

    For bash: gpuhook completion bash > /etc/bash_completion.d/gpuhook
    """
    kind = get_completion_class(shell)
    if kind is None:
        raise click.ClickException(f"This click has no completion for {shell}.")
    script = kind(ctx.find_root().command, {}, "gpuhook", "_GPUHOOK_COMPLETE")
    # The template alone: source() would look for a bash to ask for its version.
    click.echo(script.source_template % script.source_vars())

"""``nvidia-ctk config``: printing and changing gpuhook's config.toml, or another file."""

import contextlib
import os

import click

from gpuhook.base.config.loader import loads
from gpuhook.base.config.model import FEATURE_PREFIX, KEYS, WITHOUT_EFFECT
from gpuhook.base.config.source import read_text
from gpuhook.base.errors import ConfigError
from gpuhook.base.host import files as host_files
from gpuhook.nvidia_cli.ctk_words import PROGRAM, config_path, say
from gpuhook.tools.cli._help import Command, Group
from gpuhook.tools.cli.config import changing, chosen_file, default_text, save
from gpuhook.tools.cli.runtime import switch
from gpuhook.tools.config.edit import parse_assignment, set_value
from gpuhook.vendors import registry

_OUTPUT = click.option(
    "-o", "--output", metavar="FILE", help="The file to write.  [default: standard output]"
)


@click.group(
    cls=Group,
    invoke_without_command=True,
    examples={
        f"{PROGRAM} config --in-place --set nvidia-container-runtime.mode=cdi": "Change a setting",
        f"{PROGRAM} config --set nvidia-container-cli.no-cgroups": "Print the file with one set",
    },
)
@click.option(
    "-c", "--config-file", "--config", "file", metavar="FILE",
    help="The file to read.  [default: gpuhook's config.toml]",
)  # fmt: skip
@click.option(
    "--set", "assignments", multiple=True, metavar="KEY[=VALUE]",
    help="A setting to change; may be repeated.",
)  # fmt: skip
@click.option("--set-list-separator", default=":", hidden=True)
@switch("-i", "--in-place", help="Write to the file that was read.")
@_OUTPUT
@click.pass_context
def config(
    ctx: click.Context,
    file: str | None,
    assignments: tuple[str, ...],
    set_list_separator: str,
    in_place: bool,
    output: str | None,
) -> None:
    """Print the configuration, with changed settings, or write it.

    A missing file counts as gpuhook's defaults, all of them as comments.
    """
    if ctx.invoked_subcommand:
        return
    if not set_list_separator:
        raise ConfigError("The list separator is empty", "Leave --set-list-separator out")
    path = chosen_file(file or config_path())
    with changing(path) if in_place else contextlib.nullcontext():
        try:
            text = read_text(path)
        except FileNotFoundError:
            text = default_text()
        for word in assignments:
            for assignment in _split(word):
                text = _changed(text, assignment, set_list_separator)
        registry.all_vendors(loads(text, path))
        if in_place:
            save(path, text)
        else:
            _deliver(text, output, host_files.copy_mode(path))


def _split(word: str) -> list[str]:
    """Return the settings of one --set: several with commas, or one with commas in its value."""
    parts = word.split(",")
    keys = [part.partition("=")[0] for part in parts]
    known = (*KEYS, *WITHOUT_EFFECT)
    if all(key in known or key.startswith(FEATURE_PREFIX) for key in keys):
        return parts
    return [word]


def _changed(text: str, assignment: str, separator: str) -> str:
    key = assignment.partition("=")[0]
    if key in WITHOUT_EFFECT:
        say(f"warning: {key} is left out, because it has no effect: {WITHOUT_EFFECT[key]}")
        return text
    return set_value(text, *parse_assignment(assignment, separator))


def _deliver(text: str, path: str | None, mode: int | None = None) -> None:
    if path is None:
        click.echo(text, nl=False)
    else:
        save(os.path.abspath(path), text, mode)


def _default(output: str | None) -> None:
    """Print the configuration with every key, its meaning and its default."""
    _deliver(default_text(), output)


for name in ("default", "create-default", "generate-default"):
    config.add_command(
        _OUTPUT(
            click.command(
                name, cls=Command, hidden=name != "default",
                examples={f"{PROGRAM} config {name} --output=./config.toml": "Create a new file"},
            )(_default)
        )
    )  # fmt: skip

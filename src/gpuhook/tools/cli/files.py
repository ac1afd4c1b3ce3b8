"""``gpuhook files``: print a file that comes along with the programs."""

from collections.abc import Iterable

import click

from gpuhook.ground.errors import shown
from gpuhook.tools.cli import _completion as completing
from gpuhook.tools.cli import _shipped as shipped
from gpuhook.tools.cli._help import command
from gpuhook.tools.config.misspelt import did_you_mean, similar
from gpuhook.tools.host.programs import our_program


def _files() -> dict[str, shipped.File]:
    """Return the files by where an administrator has them; install --cdi places the others."""
    every = shipped.files(our_program("gpuhook"))
    placed = ((file.path(shipped.OF_ADMINISTRATOR), file) for file in every)
    return {path: file for path, file in placed if path}


@completing.never_failing
def _paths(*_: object) -> Iterable[str]:
    return _files()


@command(
    examples={
        "gpuhook files": "Show where an administrator has each of them",
        "gpuhook files /etc/systemd/system/gpuhook-watch.service > watch.service": "Print one",
    },
)
@click.argument("path", required=False, metavar="[PATH]", shell_complete=_paths)
def files(path: str | None) -> None:
    """Print a manual page, a unit, or another file that comes with gpuhook.

    PATH is where an administrator has it; without one, these paths are printed. The Debian package
    has all of them in place.
    """
    known = _files()
    if path is None:
        click.echo("\n".join(known))
        return
    if path not in known:
        question = did_you_mean(similar(path, [*known]))
        raise click.UsageError(f"{shown(path)} is no file of gpuhook's.{question}")
    click.echo(known[path].text, nl=False)

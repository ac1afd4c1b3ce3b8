"""``gpuhook files``: print a file that is shipped with gpuhook."""

from collections.abc import Iterable

import click

from gpuhook.base.errors import shown
from gpuhook.core.suggest import did_you_mean, similar
from gpuhook.monitor.host.driver_program import our_program
from gpuhook.tools.cli import _completion as completing
from gpuhook.tools.cli import _shipped as shipped
from gpuhook.tools.cli._help import command


def _files() -> dict[str, shipped.File]:
    """Return the files by destination path; install --cdi places the others."""
    every = shipped.files(our_program("gpuhook"))
    placed = ((file.path(shipped.OF_ADMINISTRATOR), file) for file in every)
    return {path: file for path, file in placed if path}


@completing.never_failing
def _paths(*_: object) -> Iterable[str]:
    return _files()


@command(
    examples={
        "gpuhook files": "List the paths of all files",
        "gpuhook files /etc/systemd/system/gpuhook-watch.service > watch.service": "Print one",
    },
)
@click.argument("path", required=False, metavar="[PATH]", shell_complete=_paths)
def files(path: str | None) -> None:
    """Print a manual page, a unit, or another file that is shipped with gpuhook.

    PATH is the file's destination on the system; without PATH, all destinations are listed. The
    Debian packages install all of these files, each package those of its commands.
    """
    known = _files()
    if path is None:
        click.echo("\n".join(known))
        return
    if path not in known:
        question = did_you_mean(similar(path, [*known]))
        raise click.UsageError(f"{shown(path)} isn't a file of gpuhook.{question}")
    click.echo(known[path].text, nl=False)

"""Helpers that install, uninstall and configure share: paths, checks and reports."""

import contextlib
import io
import os
import re
from collections.abc import Iterable, Iterator

import click

from gpuhook.base.errors import EngineError, shown
from gpuhook.tools.cli._output import say, warn
from gpuhook.tools.engines.installer import Outcome
from gpuhook.tools.engines.known import ENGINES
from gpuhook.tools.engines.merge import Path
from gpuhook.tools.vendors.nvidia.program_links import LinkRecord

ALL = "all"


def absolute(path: str | None) -> str | None:
    """Return the absolute form of a path given by the user."""
    return os.path.abspath(path) if path else None


def checked_program(path: str, prefix: str, *, later: bool = False) -> str:
    """Return the path of a program for an engine; EngineError if the engine can't run it.

    ``later`` allows it to be missing, because the user installs it later.
    """
    if not os.path.isabs(path):
        raise EngineError(f"{path} isn't an absolute path", "Give the full path of the program")
    if later and not os.path.lexists(path):
        warn(f"{path} doesn't exist yet: no container of this runtime starts until it does")
    elif not prefix and not os.access(path, os.X_OK):
        raise EngineError(
            f"{path} isn't an executable program", "Check the path, or reinstall gpuhook"
        )
    return path


def check_name(name: str) -> None:
    """Raise EngineError for a runtime name that some engine doesn't support."""
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", name) is None:
        raise EngineError(
            f"{shown(name)} isn't a valid runtime name",
            "Use letters, digits, dots, dashes and underscores, at most 63",
        )


def reload(engine: str, config: str) -> bool:
    """Make the engine's daemons reload a file and report it; return False if they can't."""
    pids = ENGINES[engine].reload(config)
    if pids is None:
        return False
    for pid in pids:
        say(f"{engine}: process {pid} has reloaded {config}")
    if not pids:
        say(f"{engine}: no running process uses {config}")
    return True


def tell(outcomes: list[Outcome], *, dry_run: bool) -> None:
    """Print the changes made to the files, or as a diff those that would be made."""
    for outcome in outcomes:
        change = outcome.change
        if not change:
            say(f"{outcome.engine}: unchanged {change.path}")
        elif dry_run:
            click.echo(change.diff(), nl=False)
        elif change.new is None:
            say(f"{outcome.engine}: removed {change.path}")
        else:
            word = "wrote" if change.old is None else "changed"
            say(f"{outcome.engine}: {word} {change.path}")
        if change.aside:
            keeps = "would keep" if dry_run else "kept"
            say(f"{outcome.engine}: {keeps} the edited file as {change.aside}")


def changed(engine: str, outcomes: Iterable[Outcome]) -> list[str]:
    """Return the paths of an engine's changed files."""
    mine = [outcome.change for outcome in outcomes if outcome.engine == engine]
    return [change.path for change in mine if change]


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Suppress standard output in the block, because JSON follows it."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield


def runtimes_in(owned: Iterable[Path]) -> tuple[str, ...]:
    """Return the names of our runtimes: our entries in an engine's table of runtimes."""
    return tuple(dict.fromkeys(path[-1] for path in owned if path[-2:-1] == ("runtimes",)))


def take_links_back(record: LinkRecord, *, is_last: bool, dry_run: bool) -> list[str]:
    """Remove NVIDIA's program names with the last configuration; until then report them kept.

    Return the paths that were removed, or would be.
    """
    there = [link for link in record.links() if link.is_there]
    if not is_last:
        if there:
            paths = ", ".join(link.path for link in there)
            say(
                f"kept for the engines still installed: {paths}; "
                "gpuhook uninstall without --engine and --config removes them too"
            )
        return []
    word = "would remove" if dry_run else "removed"
    gone = there if dry_run else record.remove()
    for link in gone:
        say(f"{word} {link.path}")
    return [link.path for link in gone]

"""What install, uninstall and configure share: where things are, and how results are told."""

import contextlib
import io
import os
import re
from collections.abc import Iterable, Iterator

import click

from gpuhook.ground.errors import EngineError, shown
from gpuhook.tools.cli._output import say, warn
from gpuhook.tools.engines.installer import Outcome
from gpuhook.tools.engines.known import ENGINES
from gpuhook.tools.engines.merge import Path
from gpuhook.tools.vendors.nvidia.program_links import LinkRecord

ALL = "all"


def absolute(path: str | None) -> str | None:
    """Return a path that was given by the user as an absolute one."""
    return os.path.abspath(path) if path else None


def checked_program(path: str, prefix: str, *, later: bool = False) -> str:
    """Return the path of a program that an engine is to start; EngineError if it can't be.

    ``later`` says that it may be missing: the caller puts it there.
    """
    if not os.path.isabs(path):
        raise EngineError(f"{path} isn't an absolute path", "Give the whole path of the program")
    if later and not os.path.lexists(path):
        warn(f"{path} isn't there yet: no container of this runtime starts before it is")
    elif not prefix and not os.access(path, os.X_OK):
        raise EngineError(
            f"{path} isn't a program that can be started", "Check the path, or reinstall gpuhook"
        )
    return path


def check_name(name: str) -> None:
    """Raise EngineError for a runtime's name that not every engine understands."""
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", name) is None:
        raise EngineError(
            f"{shown(name)} can't be a runtime's name",
            "Use letters, digits, dots, dashes and underscores, at most 63",
        )


def reload(engine: str, config: str) -> bool:
    """Have the engine's daemons read a file again and say so; False if they can't."""
    pids = ENGINES[engine].reload(config)
    if pids is None:
        return False
    for pid in pids:
        say(f"{engine}: process {pid} has read {config} again")
    if not pids:
        say(f"{engine}: nothing runs that has read {config}")
    return True


def tell(outcomes: list[Outcome], *, dry_run: bool) -> None:
    """Print what was done to the files, or as a diff what would be."""
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
            say(f"{outcome.engine}: {keeps} what was edited there in {change.aside}")


def changed(engine: str, outcomes: Iterable[Outcome]) -> list[str]:
    """Return the paths of an engine's files that were changed."""
    mine = [outcome.change for outcome in outcomes if outcome.engine == engine]
    return [change.path for change in mine if change]


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Print nothing to standard output in the block, because JSON comes after it."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield


def runtimes_in(owned: Iterable[Path]) -> tuple[str, ...]:
    """Return the runtimes' names: what we own in an engine's table of runtimes."""
    return tuple(dict.fromkeys(path[-1] for path in owned if path[-2:-1] == ("runtimes",)))


def take_links_back(record: LinkRecord, *, is_last: bool, dry_run: bool) -> list[str]:
    """Remove NVIDIA's names with the last configuration; until then say that they stay.

    Returns the paths that were removed, or would be.
    """
    there = [link for link in record.links() if link.is_there]
    if not is_last:
        if there:
            paths = ", ".join(link.path for link in there)
            say(
                f"kept for what else is installed: {paths}; "
                "gpuhook uninstall without --engine and --config removes them too"
            )
        return []
    word = "would remove" if dry_run else "removed"
    gone = there if dry_run else record.remove()
    for link in gone:
        say(f"{word} {link.path}")
    return [link.path for link in gone]

"""gpuhook cdi refresh: the documents that install --cdi keeps, as the machine is now."""

import os
import sys

import click

from gpuhook.tools.cdi import refresh as refreshing
from gpuhook.tools.cdi.kept import Failure
from gpuhook.tools.cli._help import command
from gpuhook.tools.cli._output import say, warn
from gpuhook.tools.cli._places import state_folder

_NOTHING = (
    "gpuhook install --cdi keeps no documents here: there is nothing to refresh; "
    "gpuhook cdi generate --output FOLDER writes them once"
)


@command(
    examples={
        "gpuhook cdi refresh": "Write the documents again after MIG devices were made or removed",
    },
)
@click.option("--prefix", metavar="DIR", default="", help="A folder to use as /.")
@click.option("--state-dir", metavar="DIR", help="Where install has remembered what to keep.")
def refresh(prefix: str, state_dir: str | None) -> None:
    """Bring the documents that ``gpuhook install --cdi`` keeps up to date.

    A document whose driver is gone is removed. Where a driver doesn't answer, the old one
    stays, the status is 1, and ``gpuhook doctor`` says why until it succeeds. The units and
    ``gpuhook watch`` run this; run it yourself after MIG devices were made or removed.
    """
    prefix = prefix and os.path.abspath(prefix)
    report = refreshing.refresh(state_folder(state_dir, prefix), prefix)
    if report is None:
        say(_NOTHING)
        return
    tell(report)
    if report.failures:
        sys.exit(1)


def tell(report: refreshing.Report) -> None:
    """Print what a refresh did."""
    for warning in report.warnings:
        warn(warning)
    lines = [*report.done, *report.said]
    if report.absent and not lines and not report.failures:
        lines = [f"{report.absent[0]}; documents come once there is a driver"]
    for line in lines:
        say(line)
    for failure in report.failures:
        say(f"gpuhook: {sentence(failure)}", err=True)


def sentence(failure: Failure) -> str:
    """Return a failure in words."""
    kept = " (the old document stays)" if failure.kind else ""
    of = f"{failure.kind}: " if failure.kind else ""
    return f"{of}{failure.error}{kept}. {failure.remedy}."

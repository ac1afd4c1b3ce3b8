"""gpuhook cdi refresh: regenerate the CDI specs that install --cdi manages."""

import os
import sys

import click

from gpuhook.tools.cdi import refresh as refreshing
from gpuhook.tools.cdi.managed_specs import RefreshFailure
from gpuhook.tools.cli._help import command
from gpuhook.tools.cli._output import say, warn
from gpuhook.tools.engines.prefix import state_folder

_NOTHING = (
    "gpuhook install --cdi manages no CDI specs here: there is nothing to refresh; "
    "gpuhook cdi generate --output FOLDER writes them once"
)


@command(
    examples={
        "gpuhook cdi refresh": "Regenerate the CDI specs after MIG devices changed",
    },
)
@click.option("--prefix", metavar="DIR", default="", help="Folder to use as /.")
@click.option("--state-dir", metavar="DIR", help="State folder of install.")
def refresh(prefix: str, state_dir: str | None) -> None:
    """Update the CDI specs that ``gpuhook install --cdi`` manages.

    A spec is removed if its driver is gone. If a driver doesn't answer, the old spec stays, the
    exit status is 1, and ``gpuhook doctor`` reports the reason until a refresh succeeds. The
    units and ``gpuhook watch`` run this command; run it yourself after MIG devices were created
    or removed.
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
    """Print the result of a refresh."""
    for warning in report.warnings:
        warn(warning)
    lines = [*report.done, *report.said]
    if report.absent and not lines and not report.failures:
        lines = [f"{report.absent[0]}; CDI specs are written once there is a driver"]
    for line in lines:
        say(line)
    for failure in report.failures:
        say(f"gpuhook: {sentence(failure)}", err=True)


def sentence(failure: RefreshFailure) -> str:
    """Return a failure as a sentence."""
    kept = " (the old CDI spec stays)" if failure.kind else ""
    of = f"{failure.kind}: " if failure.kind else ""
    return f"{of}{failure.error}{kept}. {failure.remedy}."

"""gpuhook watch: keep the saved inventory fresh, and a process ready for the next container."""

import os
import signal

import click

from gpuhook.cdi import refresh as refreshing
from gpuhook.cli import _engines as shared
from gpuhook.cli._help import Seconds, command
from gpuhook.cli._output import config_option
from gpuhook.cli.cdi_refresh import sentence
from gpuhook.config import load
from gpuhook.errors import GpuhookError, WatchError
from gpuhook.host.programs import our_program
from gpuhook.start.watch import Events, Watch
from gpuhook.vendors.uevents import concerns_us

_SHORTEST, _LONGEST = 0.1, 86400.0  # seconds between two looks


class _Documents:
    """The CDI documents that install --cdi keeps, refreshed again and again."""

    def __init__(self, state: str) -> None:
        self._state = state
        self._said: list[str] = []

    def refresh(self) -> bool:
        """Refresh them and print changes, and what is wrong once; False if anything failed."""
        try:
            report = refreshing.refresh(self._state) or refreshing.Report()
        except GpuhookError as error:
            report, wrong, failed = refreshing.Report(), [str(error)], True
        else:
            failed = bool(report.failures)
            wrong = [*report.warnings, *map(sentence, report.failures)]
        for line in (*report.done, *(each for each in wrong if each not in self._said)):
            click.echo(line)
        self._said = wrong
        return not failed


@command(
    examples={
        "gpuhook watch --interval 10": "Look every ten seconds, where the kernel reports no event",
    },
)
@click.option(
    "--interval",
    default=60.0,
    show_default=True,
    type=Seconds(_SHORTEST, _LONGEST),
    metavar="SECONDS",
    help="The time between two looks where no event comes.",
)
@click.option("--state-dir", metavar="DIR", help="Where install has remembered what to keep.")
@config_option
def watch(interval: float, state_dir: str | None, config_path: str | None) -> None:
    """Keep the saved inventory fresh, and a process ready for the next container.

    The inventory is made again whenever GPUs, MIG devices or the driver change, and a line is
    printed; so are the CDI documents that ``gpuhook install --cdi`` keeps. Runs until it is told
    to stop (SIGTERM, SIGINT). The Debian package runs it as gpuhook-watch.service; where it
    doesn't run, the first container after a pause starts more slowly.
    """
    config = load(config_path)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(0))  # there is nothing to tidy up
    try:
        with Events(lambda event: concerns_us(event, config)) as events:
            documents = _Documents(shared.state_folder(state_dir, ""))
            launcher = our_program("gpu-py")
            Watch(config, launcher, click.echo, documents.refresh).run(events, interval)
    except OSError as error:
        raise WatchError(
            f"The kernel's events can't be listened to: {error.strerror}",
            "Run this on the host, in its own network namespace",
        ) from None

"""gpuhook watch: keep the saved inventory fresh, and a process ready for the next container."""

import os
import signal

import click

from gpuhook.cli import _engines as shared
from gpuhook.cli._output import config_option
from gpuhook.config import load
from gpuhook.errors import WatchError


@click.command(short_help="Keep container starts fast, as a service.")
@click.option(
    "--interval",
    default=60.0,
    show_default=True,
    type=click.FloatRange(min=0.1),
    help="Seconds between two looks where no event comes.",
)
@config_option
def watch(interval: float, config_path: str | None) -> None:
    """Keep the saved inventory fresh, and a process ready for the next container.

    The inventory is made again whenever GPUs, MIG devices or the driver change, and a line is
    printed. Runs until it is told to stop (SIGTERM, SIGINT). The Debian package runs it as
    gpuhook-watch.service; where it doesn't run, the first container after a pause pays.
    """
    from gpuhook.start.watch import Events, Watch, concerns_us  # noqa: PLC0415 - pyroute2 takes 100 ms

    config = load(config_path)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(0))  # there is nothing to tidy up
    try:
        with Events(lambda event: concerns_us(event, config)) as events:
            Watch(config, shared.our_program("gpu-py"), click.echo).run(events, interval)
    except OSError as error:
        raise WatchError(
            f"The kernel's events can't be listened to: {error.strerror}",
            "Run this on the host, in its own network namespace",
        ) from None

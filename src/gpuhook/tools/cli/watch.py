"""gpuhook watch: keep the saved inventory fresh, and run the prefork server."""

import os
import signal
from collections.abc import Callable, Sequence
from functools import partial

import click

from gpuhook.base.errors import GpuhookError, WatchError
from gpuhook.monitor.followed import FollowedConfig
from gpuhook.monitor.host import systemctl as systemd
from gpuhook.monitor.host.driver_program import our_program
from gpuhook.monitor.vendors.survey import concerns_us
from gpuhook.tools import extensions
from gpuhook.tools.cdi import refresh as refreshing
from gpuhook.tools.cli import _guests as guests
from gpuhook.tools.cli._help import SecondsParam, command
from gpuhook.tools.cli._output import config_option, say
from gpuhook.tools.cli.cdi_refresh import sentence
from gpuhook.tools.engines import charliecloud
from gpuhook.tools.engines.prefix import state_folder
from gpuhook.tools.watch import DeviceEvents, HostWatcher

# What a changed file needs before the next start.
_AFTERWARDS: dict[str, Callable[[], object]] = {
    guests.NSPAWN: lambda: systemd.call("daemon-reload"),
    guests.LXC: lambda: None,
}
_SHORTEST, _LONGEST = 0.1, 86400.0  # polling interval in seconds


class _SpecRefresh:
    """The CDI specs that install --cdi keeps, refreshed repeatedly."""

    def __init__(self, state: str) -> None:
        self._state = state
        self._said: list[str] = []

    def refresh(self) -> bool:
        """Refresh them and print changes, and each problem once; False if anything failed."""
        try:
            report = refreshing.refresh(self._state) or refreshing.Report()
        except GpuhookError as error:
            report, wrong, failed = refreshing.Report(), [str(error)], True
        else:
            failed = bool(report.failures)
            wrong = [*report.warnings, *map(sentence, report.failures)]
        for line in (*report.done, *(each for each in wrong if each not in self._said)):
            say(line)
        self._said = wrong
        return not failed


class _Files:
    """Files with devices that install has written for an engine, to be written again.

    ``write`` does so and returns the changed files and the errors; ``afterwards`` runs after
    changes.
    """

    def __init__(
        self,
        engine: str,
        write: Callable[[], tuple[list[str], Sequence[GpuhookError]]],
        afterwards: Callable[[], object] = lambda: None,
    ) -> None:
        self._engine = engine
        self._write = write
        self._afterwards = afterwards
        self._said: list[str] = []

    def refresh(self) -> bool:
        """Write them, and print changes, and each problem once; False if anything failed."""
        try:
            changed, failed = self._write()
            for path in changed:
                word = "wrote" if os.path.exists(path) else "removed"
                say(f"{self._engine}: {word} {path}")
            if changed:
                self._afterwards()
        except GpuhookError as error:
            failed = [error]
        wrong = [str(error) for error in failed]
        for line in wrong:
            if line not in self._said:
                say(line)
        self._said = wrong
        return not wrong


@command(
    examples={
        "gpuhook watch --interval 10": "Look every ten seconds, where the kernel reports no event",
    },
)
@click.option(
    "--interval",
    default=60.0,
    show_default=True,
    type=SecondsParam(_SHORTEST, _LONGEST),
    metavar="SECONDS",
    help="The polling interval if no events come.",
)
@click.option("--state-dir", metavar="DIR", help="The folder with install's data.")
@config_option
def watch(interval: float, state_dir: str | None, config_path: str | None) -> None:
    """Keep the saved inventory fresh, and run the prefork server.

    The inventory is made again whenever GPUs, MIG devices or the driver change, and a line is
    printed; so are the CDI specs that ``gpuhook install`` keeps, including Charliecloud's,
    and the files of nspawn machines and LXC containers that have devices. Runs until it is
    stopped (SIGTERM, SIGINT). The Debian package runs it as gpuhook-watch.service; where it
    doesn't run, the first container after a pause starts more slowly.
    """
    followed = FollowedConfig(config_path)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(0))  # there is nothing to tidy up
    try:
        listening = DeviceEvents(lambda event: concerns_us(event, followed.config))
    except OSError as error:
        raise WatchError(
            f"The kernel's events can't be listened to: {error.strerror}",
            "Run this on the host, in its own network namespace",
        ) from None
    with listening as events:
        state = state_folder(state_dir, "")
        kept: list[_SpecRefresh | _Files] = [
            _SpecRefresh(state),
            _Files("charliecloud", lambda: charliecloud.refresh(state, config_path)),
        ]
        kept += [
            _Files(engine, partial(module.refresh, state), afterwards)
            for engine, afterwards in _AFTERWARDS.items()
            if (module := extensions.module(engine))
        ]
        launcher = our_program("gpu-py")

        def refresh() -> bool:
            done = [each.refresh() for each in kept]
            return all(done)

        HostWatcher(followed.config, launcher, say, refresh, followed).run(events, interval)

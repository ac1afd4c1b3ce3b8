"""gpuhook stats: each container's use of the devices, live in a terminal."""

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click
from rich.live import Live

from gpuhook.base.config.loader import load
from gpuhook.base.errors import printable
from gpuhook.base.host import signals
from gpuhook.core.inventory.cache import get_inventory
from gpuhook.metrics.commands import stats_view as _stats_view
from gpuhook.metrics.model import Snapshot
from gpuhook.metrics.observer import Observer
from gpuhook.monitor.vendors import survey
from gpuhook.tools.cli import _keys, _screen
from gpuhook.tools.cli._containers import pod_resources_option
from gpuhook.tools.cli._help import Seconds, command
from gpuhook.tools.cli._output import config_option, format_option, print_json

_INTERVAL = 2.0  # polling interval in seconds
_SHORTEST, _LONGEST = 0.2, 86400.0
_END = ("q", "Q")


@command(
    examples={
        "gpuhook stats": "Watch the GPUs and the containers",
        "gpuhook stats --no-stream": "Look once",
        "gpuhook stats --format json --interval 10": "A line of JSON each ten seconds",
    },
)
@click.option("--no-stream", is_flag=True, help="Print once and end.")
@click.option(
    "--interval", type=Seconds(_SHORTEST, _LONGEST), default=_INTERVAL, show_default=True,
    metavar="SECONDS", help=f"The polling interval, {_SHORTEST:g} or more.",
)  # fmt: skip
@pod_resources_option
@config_option
@format_option
def stats(
    no_stream: bool,
    interval: float,
    pod_resources: str,
    config_path: str | None,
    output_format: str,
) -> None:
    """Show the GPUs' load, and each container's use of them, until q or Ctrl-C ends it.

    On a terminal the view is redrawn at each interval. Elsewhere, and on a terminal that can't
    redraw (TERM=dumb), each view is printed below the one before; with --format json it is one
    line. The SM column is the mean since the view before, in the first view that of two seconds.

    Run it as root: other users see only their own containers.
    """
    config = load(config_path)
    observer = Observer(config, each=True, pod_resources=pod_resources)
    as_json = output_format == "json"
    with _ended_by_signals():
        try:
            look = observer.take()
            if not look.devices and (no_stream or not look.errors.get("inventory")):
                survey.present(config, lambda vendor: get_inventory(config, vendor))  # or says why
                look = observer.take()
            if no_stream:
                _show_once(_opened(observer, look), as_json=as_json)
            elif as_json:
                _stream(observer, look, interval, _line_of_json)
            elif _screen.can_redraw():
                _live(observer, look, interval)
            else:
                _stream(observer, look, interval, _Printed().show)
        except KeyboardInterrupt:
            pass  # it is how this ends
        finally:
            observer.let_go()


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP act like Ctrl-C, so that the terminal is restored."""
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = {each: signal.signal(each, signal.default_int_handler) for each in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _opened(observer: Observer, look: Snapshot) -> Snapshot:
    """Return a snapshot with the driver's data: the first may come while it is opened."""
    waited = 0
    while look.errors.get("starting", 0) > waited:
        waited = look.errors["starting"]
        look = observer.take()
    return look


def _show_once(look: Snapshot, *, as_json: bool) -> None:
    if as_json:
        print_json(_stats_view.as_json(look, time.time()))
        return
    _Printed().show(look)


def _line_of_json(look: Snapshot) -> None:
    click.echo(json.dumps(_stats_view.as_json(look, time.time())))


class _Printed:
    """Snapshots one below the other; missing data is reported on standard error on changes."""

    def __init__(self) -> None:
        self._said: tuple[str, ...] = ()
        self._is_first = True

    def show(self, look: Snapshot) -> None:
        """Print a snapshot."""
        if not self._is_first:
            click.echo()
        self._is_first = False
        bars = _screen.can_redraw()
        width = _screen.console().width
        _screen.show(_stats_view.tables(look, width, bars=bars))
        said = (*look.problems, *look.notes)
        if said != self._said:
            for each in said:
                click.echo(f"gpuhook: {printable(each)}.", err=True)
        self._said = said


def _stream(
    observer: Observer, look: Snapshot, interval: float, show: Callable[[Snapshot], None]
) -> None:
    while True:
        show(look)
        sys.stdout.flush()
        time.sleep(interval)
        look = observer.take()


def _live(observer: Observer, look: Snapshot, interval: float) -> None:
    """Draw snapshots on the whole terminal, again when its size changes, until q is typed."""
    history = _stats_view.History()
    with _keys.Keys() as keys, _screen.live() as drawn:
        while True:
            history.add(look)
            heading = f"{time.strftime('%H:%M:%S')}, every {interval:g} s; q ends this"
            drawn.update(_stats_view.View(look, heading, history), refresh=True)
            end = time.monotonic() + interval
            while (patience := end - time.monotonic()) > 0:
                came = keys.wait(patience)
                if came in _END:
                    return
                if came == signal.SIGTSTP:
                    _pause(drawn, keys)
                elif came == signal.SIGWINCH:
                    drawn.refresh()
            look = observer.take()


def _pause(drawn: Live, keys: _keys.Keys) -> None:
    """Suspend on Ctrl-Z: restore the terminal until the shell continues this process."""
    drawn.stop()
    keys.give_back()
    signals.send_to_self(signal.SIGSTOP)
    keys.take()
    drawn.start(refresh=True)

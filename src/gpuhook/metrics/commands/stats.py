"""gpuhook stats: each container's use of the devices, live in a terminal."""

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import click
from rich.live import Live

from gpuhook.base.config.loader import load
from gpuhook.base.errors import ContainerError, UnknownDeviceError, listed, printable
from gpuhook.base.host import signals
from gpuhook.core.inventory.cache import get_inventory
from gpuhook.metrics.commands import stats_view as _stats_view
from gpuhook.metrics.model import Snapshot
from gpuhook.metrics.observer import Observer
from gpuhook.monitor.vendors import survey
from gpuhook.tools.cli import _completion as completing
from gpuhook.tools.cli import _keys, _screen
from gpuhook.tools.cli._containers import pod_resources_option
from gpuhook.tools.cli._help import Command, SecondsParam, command
from gpuhook.tools.cli._output import config_option, format_option, print_json

_INTERVAL = 2.0  # polling interval in seconds
_SHORTEST, _LONGEST = 0.2, 86400.0
_END = ("q", "Q")
_SCROLL = {
    _keys.UP: -1, _keys.DOWN: 1, "k": -1, "j": 1, _keys.PAGE_UP: -10, _keys.PAGE_DOWN: 10,
    _keys.HOME: -(1 << 20), _keys.END: 1 << 20,
}  # fmt: skip


@command(
    examples={
        "gpuhook stats": "Watch the GPUs and the containers",
        "gpuhook stats --no-stream": "Look once",
        "gpuhook stats --gpu 0 --sort load": "Watch only GPU 0, and sort by load",
        "gpuhook stats --format json --interval 10": "A line of JSON each ten seconds",
    },
)
@click.option("--no-stream", is_flag=True, help="Print once and end.")
@click.option(
    "--interval", type=SecondsParam(_SHORTEST, _LONGEST), default=_INTERVAL, show_default=True,
    metavar="SECONDS", help=f"The polling interval, {_SHORTEST:g} or more.",
)  # fmt: skip
@click.option(
    "--container", "containers", metavar="NAME", multiple=True,
    shell_complete=completing.containers,
    help="Only this container: its name, pod, or the start of its id; may be repeated.",
)  # fmt: skip
@click.option(
    "--gpu", "gpus", metavar="GPU", multiple=True,
    help="Only this device, by its number, with all its parts, or by its id; may be repeated.",
)  # fmt: skip
@click.option(
    "--sort", "order", type=click.Choice([*_stats_view.ORDERS.values()]),
    default=_stats_view.NAME, show_default=True,
    help="Order of containers and processes: by memory, load, processor time or name.",
)  # fmt: skip
@pod_resources_option
@config_option
@format_option
def stats(
    no_stream: bool,
    interval: float,
    containers: tuple[str, ...],
    gpus: tuple[str, ...],
    order: str,
    pod_resources: str,
    config_path: str | None,
    output_format: str,
) -> None:
    """Show the GPUs' load, and each container's use of them, until q or Ctrl-C ends it.

    On a terminal the view is redrawn at each interval. Elsewhere, and on a terminal that can't
    redraw (TERM=dumb), each view is printed below the one before; with --format json it is one
    line. The SM column is the mean since the view before, in the first view that of two seconds.
    CPU is the processes' load of the host, in percent of one processor, TIME their processor time.

    In the live view, the keys m, p, t and n sort by memory, load, processor time and name. Up,
    Down, PageUp, PageDown, Home and End scroll.

    Run it as root: other users see only their own containers.
    """
    config = load(config_path)
    observer = _FilteredObserver(
        Observer(config, each=True, pod_resources=pod_resources), containers, gpus
    )
    as_json = output_format == "json"
    with _ended_by_signals():
        try:
            look = observer.take()
            if not look.devices and (no_stream or not look.errors.get("inventory")):
                survey.present(config, lambda vendor: get_inventory(config, vendor))  # or says why
                look = observer.take()
            if no_stream:
                look = _opened(observer, look)
            observer.check(look, once=no_stream)
            if no_stream:
                _show_once(look, order, as_json=as_json)
            elif as_json:
                _stream(observer, look, interval, _line_of_json)
            elif _screen.can_redraw():
                _live(observer, look, interval, order)
            else:
                _stream(observer, look, interval, _Printer(order).show)
        except KeyboardInterrupt:
            pass  # it is how this ends
        finally:
            observer.let_go()


def _alias(name: str, line: str, **fixed: Any) -> Command:
    """Return the command under another name, which the help doesn't list."""

    @click.pass_context
    def call(ctx: click.Context, /, **given: Any) -> None:
        ctx.invoke(stats, **{**given, **fixed})

    return Command(
        name, callback=call, params=stats.params, help=stats.help, hidden=True,
        examples={f"gpuhook {name}": line},
    )  # fmt: skip


top = _alias("top", "Watch the GPUs and the containers")
ps = _alias("ps", "Show the GPUs' containers and processes once", no_stream=True)


class _FilteredObserver:
    """An observer whose snapshots have only the chosen containers and devices."""

    def __init__(
        self, observer: Observer, containers: tuple[str, ...], gpus: tuple[str, ...]
    ) -> None:
        self._observer = observer
        self._containers, self._gpus = containers, gpus
        self.let_go = observer.let_go

    def take(self) -> Snapshot:
        """Return a snapshot."""
        look = self._observer.take()
        if self._containers or self._gpus:
            look = _stats_view.filtered(look, self._containers, self._gpus)
        return look

    def check(self, look: Snapshot, *, once: bool) -> None:
        """Raise GpuhookError for names that mean nothing now; containers may come later."""
        if look.devices:
            return
        if self._containers and once:
            raise ContainerError(
                f"No running container that uses a device is named {listed(self._containers)}",
                "Name one as `gpuhook list` shows it",
            )
        if self._gpus and not self._containers:
            raise UnknownDeviceError(
                f"This host has no device {listed(self._gpus)}",
                "Name one by its number or id, as `gpuhook list` shows it",
            )


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


def _opened(observer: _FilteredObserver, look: Snapshot) -> Snapshot:
    """Return a snapshot with the driver's data: the first may come while it is opened."""
    waited = 0
    while look.errors.get("starting", 0) > waited:
        waited = look.errors["starting"]
        look = observer.take()
    return look


def _show_once(look: Snapshot, order: str, *, as_json: bool) -> None:
    if as_json:
        print_json(_stats_view.as_json(look, time.time()))
        return
    _Printer(order).show(look)


def _line_of_json(look: Snapshot) -> None:
    click.echo(json.dumps(_stats_view.as_json(look, time.time())))


class _Printer:
    """Snapshots one below the other; missing data is reported on standard error on changes."""

    def __init__(self, order: str) -> None:
        self._order = order
        self._said: tuple[str, ...] = ()
        self._is_first = True

    def show(self, look: Snapshot) -> None:
        """Print a snapshot."""
        if not self._is_first:
            click.echo()
        self._is_first = False
        bars = _screen.can_redraw()
        width = _screen.console().width
        _screen.show(_stats_view.tables(look, width, bars=bars, order=self._order))
        said = (*look.problems, *look.notes)
        if said != self._said:
            for each in said:
                click.echo(f"gpuhook: {printable(each)}.", err=True)
        self._said = said


def _stream(
    observer: _FilteredObserver, look: Snapshot, interval: float, show: Callable[[Snapshot], None]
) -> None:
    while True:
        show(look)
        sys.stdout.flush()
        time.sleep(interval)
        look = observer.take()


def _live(observer: _FilteredObserver, look: Snapshot, interval: float, order: str) -> None:
    """Draw snapshots on the whole terminal, again when its size changes, until q is typed."""
    history = _stats_view.History()
    view = _stats_view.View(look, "", history, order)
    with _keys.Keys() as keys, _screen.live() as drawn:
        while True:
            history.add(look)
            moment = time.strftime("%H:%M:%S")
            view = replace(view, look=look, heading=_heading(moment, interval, view.order))
            drawn.update(view, refresh=True)
            end = time.monotonic() + interval
            while (patience := end - time.monotonic()) > 0:
                came = keys.wait(patience)
                if came in _END:
                    return
                if came == signal.SIGTSTP:
                    _pause(drawn, keys)
                elif came == signal.SIGWINCH:
                    drawn.refresh()
                elif came in _stats_view.ORDERS:
                    order = _stats_view.ORDERS[str(came)]
                    heading = _heading(moment, interval, order)
                    view = replace(view, heading=heading, order=order, first=0)
                    drawn.update(view, refresh=True)
                elif came in _SCROLL:
                    view = view.scrolled(drawn.console, _SCROLL[came])
                    drawn.update(view, refresh=True)
            look = observer.take()


def _heading(moment: str, interval: float, order: str) -> str:
    keys = ", ".join(f"{key} {name}" for key, name in _stats_view.ORDERS.items() if name != order)
    return f"{moment}, every {interval:g} s, by {order}; q ends this; {keys}"


def _pause(drawn: Live, keys: _keys.Keys) -> None:
    """Suspend on Ctrl-Z: restore the terminal until the shell continues this process."""
    drawn.stop()
    keys.give_back()
    signals.send_to_self(signal.SIGSTOP)
    keys.take()
    drawn.start(refresh=True)

"""The device plugin's supervisor: monitors the host, and sends states to the server process.

It has one thread and one loop. Work that may hang or crash is done in children: drivers, gRPC,
generating CDI specs. The supervisor doesn't load gRPC, and so may fork.
"""

import os
import select
import signal
import sys
import time
from collections.abc import Callable, Container
from functools import partial
from importlib.util import find_spec
from types import FrameType
from typing import Any, Self

from gpuhook.base.config.model import Config
from gpuhook.base.errors import PluginError, listed
from gpuhook.cluster.device_plugin import documents, driver, folder
from gpuhook.cluster.device_plugin.children import Server
from gpuhook.cluster.device_plugin.device_monitor import DeviceMonitor
from gpuhook.cluster.device_plugin.resources import resources
from gpuhook.cluster.device_plugin.settings import CDI_ANNOTATIONS, CDI_CRI, MOUNTS, Settings
from gpuhook.cluster.device_plugin.state import State
from gpuhook.monitor import INSTALL
from gpuhook.monitor.followed import Followed
from gpuhook.monitor.host.child import BackOff
from gpuhook.monitor.machine import Found
from gpuhook.monitor.service_metrics import Calls, ServiceMetrics
from gpuhook.monitor.systemd import report_ready

_WHILE_BAD = (5.0, 600.0)  # seconds until a failed chore is retried: first, maximum
METRICS = "gpuhook_device_plugin_allocation"  # the start of its metrics' names
_NEEDED = ("grpc", "google.protobuf")


def run(settings: Settings, config: Config, followed: Followed | None = None) -> int:
    """Offer the host's devices until SIGTERM or SIGINT; return the exit status.

    1 if no driver works at the start and fail-on-init-error is set. Raises Changed if ``followed``
    has changed since the start. PluginError if the packages for talking to the kubelet are
    missing, or its folder was deleted.
    """
    check_packages()
    with Signals() as signals:
        supervisor = Supervisor(settings, config, signals, followed)
        try:
            return supervisor.run()
        except Stopped:
            return 0
        finally:
            signals.ignore()
            supervisor.end()


def check_packages() -> None:
    """Raise PluginError if packages for talking to the kubelet are missing; imports none."""
    try:
        missing = [name for name in _NEEDED if find_spec(name) is None]
    except ModuleNotFoundError as error:
        missing = [str(error.name)]  # google, of which google.protobuf is a part
    if missing:
        raise PluginError(
            "The device plugin needs the Python packages grpcio and protobuf, and the module "
            f"{missing[0]} is missing",
            INSTALL,
        )


def tell(sentence: str) -> None:
    """Print a line on standard error, and ignore that its reader may have exited."""
    line = "".join(each if each.isprintable() else "?" for each in sentence)
    try:
        sys.stderr.write(f"gpuhook: {line}\n")
        sys.stderr.flush()
    except OSError:
        pass


class Stopped(BaseException):
    """SIGTERM or SIGINT was received: interrupts any waiting."""


class Signals:
    """Signal handlers: SIGTERM and SIGINT end the loop, SIGHUP and SIGCHLD wake it.

    Children reset them.
    """

    def __init__(self) -> None:
        self.hangup = False
        self._reader, self._writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._pid = os.getpid()

    def __enter__(self) -> Self:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        signal.signal(signal.SIGHUP, self._note)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # any handler wakes the loop
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=self._forget)
        return self

    def __exit__(self, *details: object) -> None:
        signal.set_wakeup_fd(-1)
        os.close(self._reader)
        os.close(self._writer)
        self._pid = 0

    def _forget(self) -> None:
        """Reset a child's signal handlers; it doesn't use these descriptors."""
        if self._pid == 0:
            return
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)

    def _stop(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        raise Stopped

    def _note(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self.hangup = True

    def ignore(self) -> None:
        """Ignore signals during the shutdown."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)

    def fileno(self) -> int:
        """Return the descriptor that is readable after a signal."""
        return self._reader

    def read(self) -> None:
        """Discard the wake-up bytes."""
        try:
            while os.read(self._reader, 512):
                pass
        except BlockingIOError:
            pass


# A function that acts on the vendors found, and returns whether it succeeded.
Work = Callable[[Settings, Config, list[Found], Container[str], Callable[[str], None]], bool]


def _chores(settings: Settings) -> list[Work]:
    """Return the work to do when the host's devices have changed, before containers use them."""
    strategies = {*settings.device_list_strategy}
    found: list[Work] = [documents.bring] if {CDI_CRI, CDI_ANNOTATIONS} & strategies else []
    return [*found, driver.keep] if MOUNTS in strategies else found


class _RetryTask:
    """A task that is retried until it succeeds; ``at`` is the next attempt, None for none."""

    def __init__(self, work: Callable[[], bool], clock: Callable[[], float]) -> None:
        self._work = work
        self._clock = clock
        self._back_off = BackOff(*_WHILE_BAD)
        self.at: float | None = None

    def do(self) -> None:
        """Try it."""
        if self._work():
            self._back_off.reset()
            self.at = None
        else:
            self.at = self._clock() + self._back_off.grow()


class Supervisor:
    """The supervisor's loop and its state."""

    def __init__(
        self,
        settings: Settings,
        config: Config,
        signals: Signals,
        followed: Followed | None = None,
    ) -> None:
        self._settings = settings
        self._config = config
        self._followed = followed
        self._signals = signals
        self._clock = time.monotonic
        self._observed = DeviceMonitor(
            config, settings.recovery, settings.interval, settings.vendors, tell
        )
        calls = Calls(METRICS, "Allocations", ("resource",))
        self._metrics = ServiceMetrics(
            calls, settings.metrics_listen, "--metrics-listen", tell, self._clock
        )
        self._server = Server(settings, tell, self._clock)
        self._state: State | None = None
        self._warnings: list[str] = []
        self._told: dict[str, str] = {}  # logged reasons why devices are unhealthy
        self._chores = [
            _RetryTask(partial(self._do, each), self._clock) for each in _chores(settings)
        ]
        self._mps: tuple[bool, object] | None = None  # whether its daemon ran, and its state

    def run(self) -> int:
        """Run the loop; returns only 1, if no device was found and fail-on-init-error is set."""
        self._look_at_mps()
        self._observed.look(eager=True)
        problem = self._observed.machine.why_nothing()
        if problem is not None:
            tell(str(problem))
            if self._settings.fail_on_init_error:
                return 1
            tell("Waiting until there is a device")
        while True:
            self._tend()
            report_ready()
            self._wait()

    def end(self) -> None:
        """Stop all children."""
        self._observed.end()
        self._server.end()
        self._metrics.end()

    def _tend(self) -> None:
        """Do all work that is due, and publish the result."""
        observed = self._observed
        if self._signals.hangup:
            self._signals.hangup = False
            observed.hang_up()
        if observed.is_due():
            if self._followed is not None:
                self._followed.check(tell)
            folder.check_there(self._settings.kubelet_folder)
            self._look_at_mps()
        observed.tend()
        now = self._clock()
        for chore in self._chores:
            if observed.arranged or (chore.at is not None and now >= chore.at):
                chore.do()
        observed.arranged = False
        if observed.changed:
            observed.changed = False
            self._publish()
        self._server.tend()
        self._metrics.tend()

    def _wait(self) -> None:
        """Wait for messages or the next deadline, and process the messages."""
        times = [*self._observed.deadlines(), self._server.deadline()]
        times += [self._metrics.deadline(), *(chore.at for chore in self._chores)]
        end = min(at for at in times if at is not None)
        reading: list[Any] = [self._signals, *self._observed.readers()]
        if self._metrics.is_on and self._server.fileno() >= 0:
            reading.append(self._server)
        writing = [fd for fd in (self._server.wants(), *self._metrics.writers()) if fd >= 0]
        ready, free, _ = select.select(reading, writing, [], max(0.0, end - self._clock()))
        if self._signals in ready:
            self._signals.read()
        self._observed.read(ready)
        if self._server in ready:
            for each in self._server.reports():
                labels = (str(each["resource"]),)
                self._metrics.note(labels, each["seconds"], failed=each["failed"])
        if free:
            self._server.write()

    def _look_at_mps(self) -> None:
        """Check whether the MPS control daemon is running, if a resource is shared by MPS."""
        if not any(each.shares for each in self._settings.sharing.values()):
            return
        from gpuhook.vendors.nvidia import mps  # noqa: PLC0415 - few share devices by MPS

        state = mps.read(self._config.state_dir)
        lives = state is not None and mps.lives(state)
        seen = (lives, state)
        if self._mps is not None and seen != self._mps:
            self._observed.changed = True
        self._mps = seen

    def _do(self, work: Work) -> bool:
        machine = self._observed.machine
        failing = machine.failures().keys()
        return work(self._settings, self._config, machine.present, failing, tell)

    def _reasons(self) -> dict[str, str]:
        """Return why devices can't be allocated, by the ids of the offered devices."""
        reasons, found = self._observed.reasons(), dict[str, str]()
        for vendor, inventory in self._observed.machine.found:
            answers = self._observed.cluster(vendor.names)
            for device in inventory.devices:
                if device.id in reasons:
                    found.setdefault(answers.handed_out(device), reasons[device.id])
        return found

    def _publish(self) -> None:
        """Send the state to the server if it has changed."""
        machine = self._observed.machine
        health = self._reasons()
        state, warnings = resources(
            machine.found, self._settings, self._config, health, machine.links
        )
        for warning in warnings:
            if warning not in self._warnings:
                tell(warning)
        self._warnings = list(warnings)
        self._tell_reasons(state, {*health.values()})
        if state != self._state:
            self._state = state
            self._server.give(state.to_line())

    def _tell_reasons(self, state: State, said: Container[str]) -> None:
        """Log why devices are unhealthy, and which have recovered; ``said`` is logged already."""
        units = [unit for resource in state.resources for unit in resource.units]
        reasons = {unit.id: unit.reason for unit in units if unit.reason}
        new: dict[str, list[str]] = {}
        for device, reason in reasons.items():
            if reason not in said and self._told.get(device) != reason:
                new.setdefault(reason, []).append(device)
        for reason, devices in new.items():
            tell(f"{listed(devices)} {'is' if len(devices) == 1 else 'are'} unhealthy: {reason}")
        here = {unit.id for unit in units}
        well = [each for each in self._told if each in here and each not in reasons]
        if well:
            tell(f"{listed(well)} {'is' if len(well) == 1 else 'are'} healthy again")
        self._told = {each: why for each, why in reasons.items() if why not in said}

"""The device plugin's supervisor: looks at the machine, and reports states to the server.

One thread and one loop. Whatever may hang or crash is done in children: drivers, gRPC, the
making of CDI documents. It has no gRPC itself and so may fork.
"""

import os
import select
import signal
import sys
import time
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from types import FrameType
from typing import Any, Self

from gpuhook.ground.config.model import Config
from gpuhook.ground.errors import PluginError
from gpuhook.tools.host.child import BackOff
from gpuhook.tools.host.uevents import KernelEvents, listen
from gpuhook.tools.kubernetes import INSTALL, documents, driver, folder
from gpuhook.tools.kubernetes.children import Listener, Server
from gpuhook.tools.kubernetes.health import Health
from gpuhook.tools.kubernetes.machine import Found, HostDevices
from gpuhook.tools.kubernetes.resources import resources
from gpuhook.tools.kubernetes.settings import CDI_ANNOTATIONS, CDI_CRI, MOUNTS, Settings
from gpuhook.tools.kubernetes.state import State
from gpuhook.tools.ready import report_ready
from gpuhook.tools.vendors import cluster, parts
from gpuhook.tools.vendors.cluster import Cluster
from gpuhook.tools.vendors.uevents import concerns_us

_SETTLE = 0.5  # seconds of quiet after a kernel event: a driver is loaded in many steps
_AWAY = 60.0  # seconds without NVML after SIGHUP, in which a driver can be unloaded
_SAY_AGAIN = 60.0  # seconds until the same application's error is said again
_WHILE_BAD = (5.0, 600.0)  # seconds until a chore is tried again: at first, at most
_NEEDED = ("grpc", "google.protobuf")


def run(settings: Settings, config: Config) -> int:
    """Hand out this machine's devices until SIGTERM or SIGINT; return the exit status.

    1 where no driver works at the start and fail-on-init-error is set. PluginError where the
    packages that speak with the kubelet are missing, or its folder was deleted.
    """
    check_packages()
    with _Signals() as signals:
        supervisor = Supervisor(settings, config, signals)
        try:
            return supervisor.run()
        except _Stopped:
            return 0
        finally:
            signals.ignore()
            supervisor.end()


def check_packages() -> None:
    """Raise PluginError where what speaks with the kubelet isn't installed; imports none of it."""
    try:
        missing = [name for name in _NEEDED if find_spec(name) is None]
    except ModuleNotFoundError as error:
        missing = [str(error.name)]  # google, of which google.protobuf is a part
    if missing:
        raise PluginError(
            "The device plugin needs the Python packages grpcio and protobuf, and the module "
            f"{missing[0]} isn't there",
            INSTALL,
        )


def tell(sentence: str) -> None:
    """Print a line on standard error, where nobody may be reading any more."""
    line = "".join(each if each.isprintable() else "?" for each in sentence)
    try:
        sys.stderr.write(f"gpuhook: {line}\n")
        sys.stderr.flush()
    except OSError:
        pass


class _Stopped(BaseException):
    """SIGTERM or SIGINT came: whatever is being waited for, the end comes first."""


class _Signals:
    """SIGTERM and SIGINT end all, SIGHUP and SIGCHLD wake the loop; children have none of it."""

    def __init__(self) -> None:
        self.hangup = False
        self._reader, self._writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._pid = os.getpid()

    def __enter__(self) -> Self:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        signal.signal(signal.SIGHUP, self._note)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # that there is one wakes the loop
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=self._forget)
        return self

    def __exit__(self, *details: object) -> None:
        signal.set_wakeup_fd(-1)
        os.close(self._reader)
        os.close(self._writer)
        self._pid = 0

    def _forget(self) -> None:
        """Have a child end by signals as any process does; its descriptors aren't these."""
        if self._pid == 0:
            return
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)

    def _stop(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        raise _Stopped

    def _note(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self.hangup = True

    def ignore(self) -> None:
        """Let nothing disturb the end."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)

    def fileno(self) -> int:
        """Return the descriptor that is readable after a signal."""
        return self._reader

    def read(self) -> None:
        """Forget what has come."""
        try:
            while os.read(self._reader, 512):
                pass
        except BlockingIOError:
            pass


# What is done by a function of what there is, which returns whether that went well.
Work = Callable[[Settings, Config, list[Found], Container[str], Callable[[str], None]], bool]


def _chores(settings: Settings) -> list[Work]:
    """Return what is to be done when the machine has changed, for the answers to be right."""
    strategies = {*settings.device_list_strategy}
    found: list[Work] = [documents.bring] if {CDI_CRI, CDI_ANNOTATIONS} & strategies else []
    return [*found, driver.keep] if MOUNTS in strategies else found


class _Chore:
    """Something that is tried again until it goes well; ``at`` is when, None for not at all."""

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
    """All that the loop knows."""

    def __init__(self, settings: Settings, config: Config, signals: _Signals) -> None:
        self._settings = settings
        self._config = config
        self._signals = signals
        self._clock = time.monotonic
        self._machine = HostDevices(config, tell, self._clock)
        self._health = Health(settings.recovery, self._clock)
        self._server = Server(settings, tell, self._clock)
        self._listeners: dict[str, Listener] = {}  # by vendor
        self._watched: dict[str, object] = {}  # by vendor: what its listener was started for
        self._kernel = _kernel_events()
        self._state: State | None = None
        self._warnings: list[str] = []
        self._present: set[str] = set()  # ids of all devices
        self._said: dict[tuple[str, str], float] = {}  # when errors of applications were said
        self._look_at = 0.0
        self._is_eager = False  # whether the next look waits for no pause
        self._chores = [_Chore(partial(self._do, each), self._clock) for each in _chores(settings)]
        self._mps: tuple[bool, object] | None = None  # whether its daemon was there, and its state
        self._changed = True

    def run(self) -> int:
        """Do it; status 1 where nothing was found and that counts."""
        self._look(eager=True)
        problem = self._machine.why_nothing()
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
        """End all children."""
        for listener in self._listeners.values():
            listener.stop()
        self._server.end()
        if self._kernel is not None:
            self._kernel.close()

    # What the loop does ---------------------------------------------------------------------

    def _tend(self) -> None:
        """Do all that is due, and report what has become of it."""
        if self._signals.hangup:
            self._signals.hangup = False
            self._hang_up()
        now = self._clock()
        if now >= self._look_at:
            folder.check_there(self._settings.kubelet_folder)
            self._look(eager=self._is_eager)
        due = self._health.due()
        if due is not None and now >= due:
            self._ask_again()
        for name, listener in self._listeners.items():
            listener.tend(self._inventory(name))
            for device in listener.silent & self._present:
                self._fall_ill(device, "the driver hangs when it is asked")
        for chore in self._chores:
            if chore.at is not None and now >= chore.at:
                chore.do()
        if self._changed:
            self._publish()
        self._server.tend()

    def _wait(self) -> None:
        """Wait until something is said or due, and take in what is said."""
        times = [self._look_at, self._health.due(), self._server.deadline()]
        times += [chore.at for chore in self._chores]
        times += [listener.deadline() for listener in self._listeners.values()]
        end = min(at for at in times if at is not None)
        listening = [each for each in self._listeners.values() if each.fileno() >= 0]
        reading: list[Any] = [self._signals, *listening]
        if self._kernel is not None:
            reading.append(self._kernel)
        writing = [fd for fd in (self._server.wants(),) if fd >= 0]
        ready, free, _ = select.select(reading, writing, [], max(0.0, end - self._clock()))
        if self._signals in ready:
            self._signals.read()
        if self._kernel in ready:
            self._hear_kernel()
        for name, listener in self._listeners.items():
            if listener in ready:
                self._hear(name, listener.read())
        if free:
            self._server.write()

    def _hear_kernel(self) -> None:
        """Look at the machine when the kernel has been quiet for a moment, if it is about us."""
        if self._kernel is None:
            return
        for event in [*self._kernel.read()]:
            if not event or concerns_us(event, self._config):
                self._look_at = min(self._look_at, self._clock() + _SETTLE)
                self._is_eager = True

    def _hang_up(self) -> None:
        """Let go of NVML for a while, so that a driver can be unloaded, and look again."""
        tell("SIGHUP: looking again; no driver is kept open for a minute")
        for listener in self._listeners.values():
            listener.let_go(_AWAY)
        self._look(eager=True)
        self._changed = True
        troubled = self._health.reasons()
        if troubled:
            self._note_well(self._health.asked(self._machine.ask(troubled)))

    # The machine ------------------------------------------------------------------------------

    def _look(self, *, eager: bool = False) -> None:
        """Look at all vendors, and do what follows from what is different."""
        self._is_eager = False
        self._look_at_mps()
        changed = self._machine.refresh(eager=eager)
        self._look_at = self._clock() + self._settings.interval
        if not changed:
            return
        self._changed = True
        here = {device.id for _, inventory in self._machine.found for device in inventory.devices}
        # What has gone and comes back was reset, or its driver was loaded again.
        self._note_well(self._health.reset(self._present - here))
        self._present = here
        for device in self._machine.lost():
            self._fall_ill(device, "it can't be reached any more")
        for name in self._watched.keys() - {vendor.names.NAME for vendor, _ in self._machine.found}:
            del self._watched[name]
            self._listeners[name].stop()
        for vendor, inventory in self._machine.found:
            self._watch(vendor.names, inventory)
        for chore in self._chores:
            chore.do()

    def _look_at_mps(self) -> None:
        """See whether MPS' control daemon is there, where a resource is shared by it."""
        if not any(each.shares for each in self._settings.sharing.values()):
            return
        from gpuhook.vendors.nvidia import mps  # noqa: PLC0415 - few share devices by MPS

        state = mps.read(self._config.state_dir)
        lives = state is not None and mps.lives(state)
        seen = (lives, state)
        if self._mps is not None and seen != self._mps:
            self._changed = True
        if not lives and (self._mps is None or self._mps[0]):
            tell("MPS' control daemon isn't running: devices that it shares are unhealthy")
        self._mps = seen

    def _watch(self, names: Any, inventory: Any) -> None:
        """See that somebody listens to a vendor's errors, of the devices that there are now."""
        module = parts.events(names) if self._cluster(names).listens else None
        if module is None:
            return
        listener = self._listeners.get(names.NAME)
        if listener is None:
            listener = Listener(module, names.TITLE, self._config, tell, self._clock)
            self._listeners[names.NAME] = listener
        whole = sorted(device.id for device in inventory.devices if not device.parent)
        what = inventory.version, whole
        if self._watched.get(names.NAME) != what:
            self._watched[names.NAME] = what
            listener.restart()

    def _inventory(self, name: str) -> Any:
        """Return a vendor's inventory, None where it has none; nobody listens then."""
        for vendor, inventory in self._machine.found:
            if name == vendor.names.NAME:
                return inventory
        return None

    def _do(self, work: Work) -> bool:
        machine = self._machine
        failing = machine.failures().keys()
        return work(self._settings, self._config, machine.present, failing, tell)

    # How devices are ----------------------------------------------------------------------------

    def _hear(self, name: str, events: Sequence[Mapping[str, Any]]) -> None:
        """Take in what a listener has heard."""
        module, inventory = self._listeners[name].module, self._inventory(name)
        if inventory is None:
            return
        known = {device.id for device in inventory.devices}
        for event in events:
            if "lost" not in event:
                self._hear_error(module, inventory, event)
            elif event["lost"] in known:
                self._fall_ill(event["lost"], f"it is lost: {event['why']}")

    def _hear_error(self, module: parts.Events, inventory: Any, event: Mapping[str, Any]) -> None:
        what, words = module.judge(event, self._settings.vendors.get(inventory.vendor))
        devices = module.concerned(inventory, event)
        for device in devices:
            if what == parts.FATAL:
                self._fall_ill(device.id, words)
            elif what == parts.APPLICATION:
                self._say_application(device.id, words)
        if what == parts.FATAL:
            if not devices:
                tell(f"{words} on a device that isn't there ({event.get('gpu') or 'unknown'})")
            self._look_at = min(self._look_at, self._clock() + _SETTLE)

    def _say_application(self, device: str, words: str) -> None:
        """Say that an application failed, but not each time: one may do nothing else."""
        now = self._clock()
        said = {key: at for key, at in self._said.items() if now - at < _SAY_AGAIN}
        if (device, words) not in said:
            tell(f"{device}: {words}; what runs there has to be restarted")
            said[device, words] = now
        self._said = said

    def _fall_ill(self, device: str, reason: str) -> None:
        if self._health.ill(device, reason):
            tell(f"{device} is unhealthy: {reason}")
            self._changed = True

    def _ask_again(self) -> None:
        """Ask the driver of devices that have been quiet for long enough how they are."""
        answering = self._machine.ask(self._health.reasons())
        self._note_well(self._health.asked(answering))
        self._look_at = self._clock()  # what the driver said besides

    def _note_well(self, devices: Sequence[str]) -> None:
        for device in devices:
            tell(f"{device} is healthy again")
            self._changed = True
        if devices:
            for listener in self._listeners.values():
                listener.silent.difference_update(devices)
                listener.restart()  # what was lost isn't listened to any more

    def _reasons(self) -> dict[str, str]:
        """Return why devices can't be given: their own trouble, their whole's, the driver's."""
        troubles = self._health.reasons()
        failures = self._machine.failures()
        found: dict[str, str] = {}
        for vendor, inventory in self._machine.found:
            failure = failures.get(vendor.names.NAME)
            answers = self._cluster(vendor.names)
            for device in inventory.devices:
                reason = troubles.get(device.id) or troubles.get(device.parent)
                reason = reason or (failure.cause if failure is not None else "")
                if reason:
                    found.setdefault(answers.handed_out(device), reason)
        return found

    def _cluster(self, names: Any) -> Cluster:
        return cluster.of(names, self._settings.vendors.get(names.NAME))

    def _publish(self) -> None:
        """Report to the server what there is, if that is anything new."""
        self._changed = False
        state, warnings = resources(
            self._machine.found, self._settings, self._config, self._reasons(), self._machine.links
        )
        for warning in warnings:
            if warning not in self._warnings:
                tell(warning)
        self._warnings = list(warnings)
        if state != self._state:
            self._state = state
            self._server.give(state.to_line())


def _kernel_events() -> KernelEvents | None:
    """Return what listens to the kernel; None where this process may not, and says so."""
    try:
        return KernelEvents(listen())  # pyroute2 takes more memory than all the rest here
    except OSError as error:
        tell(f"The kernel's events can't be received ({error.strerror}): changes are seen later")
        return None

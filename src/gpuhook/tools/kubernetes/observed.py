"""What this machine has and how it is, observed by a process that has one loop and no threads.

Drivers are asked, and listened to, in children: one that hangs costs its time limit, and its
devices are unwell then.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gpuhook.ground.config.model import Config
from gpuhook.tools.host.uevents import KernelEvents, listen
from gpuhook.tools.kubernetes.children import Listener
from gpuhook.tools.kubernetes.health import Health
from gpuhook.tools.kubernetes.machine import HostDevices
from gpuhook.tools.vendors import cluster, parts
from gpuhook.tools.vendors.cluster import Cluster
from gpuhook.tools.vendors.uevents import concerns_us

_SETTLE = 0.5  # seconds of quiet after a kernel event: a driver is loaded in many steps
_AWAY = 60.0  # seconds without NVML after SIGHUP, in which a driver can be unloaded
_SAY_AGAIN = 60.0  # seconds until the same application's error is said again


class Observed:
    """All vendors' devices, and the listeners to their drivers.

    ``recovery`` and ``interval`` are as in ``settings.Settings``, and ``chosen`` is its
    ``vendors``. ``changed`` is set whenever something is different, ``arranged`` when that is the
    devices themselves; who reads them sets them back.
    """

    def __init__(
        self,
        config: Config,
        recovery: float,
        interval: float,
        chosen: Mapping[str, Any],
        tell: Callable[[str], None],
        *,
        linked: bool = True,
    ) -> None:
        self._config = config
        self._interval = interval
        self._chosen = chosen
        self._tell = tell
        self._clock = time.monotonic
        self.machine = HostDevices(config, tell, self._clock, linked=linked)
        self._health = Health(recovery, self._clock)
        self._listeners: dict[str, Listener] = {}  # by vendor
        self._watched: dict[str, object] = {}  # by vendor: what its listener was started for
        self._kernel = self._kernel_events()
        self._present: set[str] = set()  # ids of all devices
        self._said: dict[tuple[str, str], float] = {}  # when errors of applications were said
        self._events: dict[str, Mapping[str, Any]] = {}  # by device: what made it unwell
        self._look_at = 0.0
        self._is_eager = False  # whether the next look waits for no pause
        self.changed = self.arranged = True

    def _kernel_events(self) -> KernelEvents | None:
        """Return what listens to the kernel; None where this process may not, and says so."""
        try:
            return KernelEvents(listen())  # pyroute2 takes more memory than all the rest here
        except OSError as error:
            why = f"The kernel's events can't be received ({error.strerror})"
            self._tell(f"{why}: changes are seen later")
            return None

    def end(self) -> None:
        """End all listeners."""
        for listener in self._listeners.values():
            listener.stop()
        if self._kernel is not None:
            self._kernel.close()

    # For the loop ---------------------------------------------------------------------------

    def is_due(self) -> bool:
        """Tell whether ``tend`` is going to look at the machine."""
        return self._clock() >= self._look_at

    def deadlines(self) -> list[float | None]:
        """Return when something is to be done, None for never."""
        limits = [listener.deadline() for listener in self._listeners.values()]
        return [self._look_at, self._health.due(), *limits]

    def readers(self) -> list[Any]:
        """Return what ``read`` is to be called with when it is readable."""
        listening: list[Any] = [each for each in self._listeners.values() if each.fileno() >= 0]
        return listening if self._kernel is None else [*listening, self._kernel]

    def read(self, ready: Sequence[Any]) -> None:
        """Take in what is said."""
        if self._kernel in ready:
            self._hear_kernel()
        for name, listener in self._listeners.items():
            if listener in ready:
                self._hear(name, listener.read())

    def tend(self) -> None:
        """Do all that is due."""
        if self.is_due():
            self.look(eager=self._is_eager)
        due = self._health.due()
        if due is not None and self._clock() >= due:
            self._ask_again()
        for name, listener in self._listeners.items():
            self._hear(name, listener.tend(self._inventory(name)))
            for device in listener.silent & self._present:
                self._fall_ill(device, "the driver hangs when it is asked")

    def hang_up(self) -> None:
        """Let go of NVML for a while, so that a driver can be unloaded, and look again."""
        self._tell("SIGHUP: looking again; no driver is kept open for a minute")
        for listener in self._listeners.values():
            listener.let_go(_AWAY)
        self.look(eager=True)
        self.changed = True
        troubled = self._health.reasons()
        if troubled:
            self._note_well(self._health.asked(self.machine.ask(troubled)))

    # The machine ------------------------------------------------------------------------------

    def look(self, *, eager: bool = False) -> None:
        """Look at all vendors, and do what follows from what is different."""
        self._is_eager = False
        changed = self.machine.refresh(eager=eager)
        self._look_at = self._clock() + self._interval
        if not changed:
            return
        self.changed = self.arranged = True
        here = {device.id for _, inventory in self.machine.found for device in inventory.devices}
        # What has gone and comes back was reset, or its driver was loaded again.
        self._note_well(self._health.reset(self._present - here))
        self._present = here
        for device in self.machine.lost():
            self._fall_ill(device, "it can't be reached any more", {"lost": device})
        for name in self._watched.keys() - {vendor.names.NAME for vendor, _ in self.machine.found}:
            del self._watched[name]
            self._listeners[name].stop()
        for vendor, inventory in self.machine.found:
            self._watch(vendor.names, inventory)

    def look_soon(self) -> None:
        """Look at the machine in a moment, once what happens there has settled."""
        self._look_at = min(self._look_at, self._clock() + _SETTLE)

    def _hear_kernel(self) -> None:
        """Look at the machine when the kernel has been quiet for a moment, if it is about us."""
        if self._kernel is None:
            return
        for event in [*self._kernel.read()]:
            if not event or concerns_us(event, self._config):
                self.look_soon()
                self._is_eager = True

    def _watch(self, names: Any, inventory: Any) -> None:
        """See that somebody listens to a vendor's errors, of the devices that there are now."""
        module = parts.events(names) if self.cluster(names).listens else None
        if module is None:
            return
        listener = self._listeners.get(names.NAME)
        if listener is None:
            listener = Listener(module, names.TITLE, self._config, self._tell, self._clock)
            self._listeners[names.NAME] = listener
        whole = sorted(device.id for device in inventory.devices if not device.parent)
        what = inventory.version, whole
        if self._watched.get(names.NAME) != what:
            self._watched[names.NAME] = what
            listener.restart()

    def _inventory(self, name: str) -> Any:
        """Return a vendor's inventory, None where it has none; nobody listens then."""
        for vendor, inventory in self.machine.found:
            if name == vendor.names.NAME:
                return inventory
        return None

    def cluster(self, names: Any) -> Cluster:
        """Return a vendor's answers for clusters, by what was chosen of it."""
        return cluster.of(names, self._chosen.get(names.NAME))

    # How devices are ----------------------------------------------------------------------------

    def reasons(self) -> dict[str, str]:
        """Return why devices can't be given, by their ids: their own trouble, else their whole's.

        Or the driver's, which concerns all its devices.
        """
        troubles = self._health.reasons()
        failures = self.machine.failures()
        found: dict[str, str] = {}
        for vendor, inventory in self.machine.found:
            failure = failures.get(vendor.names.NAME)
            for device in inventory.devices:
                reason = troubles.get(device.id) or troubles.get(device.parent)
                reason = reason or (failure.cause if failure is not None else "")
                if reason:
                    found[device.id] = reason
        return found

    def event(self, device: str) -> Mapping[str, Any]:
        """Return the error that made a device unwell, as its driver reported it; {} for none."""
        return self._events.get(device, {}) if device in self._health.reasons() else {}

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
                self._fall_ill(event["lost"], f"it is lost: {event['why']}", event)

    def _hear_error(self, module: parts.Events, inventory: Any, event: Mapping[str, Any]) -> None:
        what, words = module.judge(event, self._chosen.get(inventory.vendor))
        devices = module.concerned(inventory, event)
        for device in devices:
            if what == parts.FATAL:
                self._fall_ill(device.id, words, event)
            elif what == parts.APPLICATION:
                self._say_application(device.id, words)
        if what == parts.FATAL:
            if not devices:
                gpu = event.get("gpu") or "unknown"
                self._tell(f"{words} on a device that isn't there ({gpu})")
            self.look_soon()

    def _say_application(self, device: str, words: str) -> None:
        """Say that an application failed, but not each time: one may do nothing else."""
        now = self._clock()
        said = {key: at for key, at in self._said.items() if now - at < _SAY_AGAIN}
        if (device, words) not in said:
            self._tell(f"{device}: {words}; what runs there has to be restarted")
            said[device, words] = now
        self._said = said

    def _fall_ill(self, device: str, reason: str, event: Mapping[str, Any] | None = None) -> None:
        if self._health.ill(device, reason):
            self._tell(f"{device} is unhealthy: {reason}")
            self._events[device] = event or {}
            self.changed = True

    def _ask_again(self) -> None:
        """Ask the driver of devices that have been quiet for long enough how they are."""
        answering = self.machine.ask(self._health.reasons())
        self._note_well(self._health.asked(answering))
        self._look_at = self._clock()  # what the driver said besides

    def _note_well(self, devices: Sequence[str]) -> None:
        for device in devices:
            self._tell(f"{device} is healthy again")
            self._events.pop(device, None)
            self.changed = True
        if devices:
            for listener in self._listeners.values():
                listener.silent.difference_update(devices)
                listener.restart()  # what was lost isn't listened to any more

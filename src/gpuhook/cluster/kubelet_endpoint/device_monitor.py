"""The devices and their health on this host, watched by a process with one loop and no threads.

Children query the drivers and listen to them. A driver that hangs costs its time limit, and its
devices become unhealthy.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gpuhook.base.config.model import Config
from gpuhook.cluster.kubelet_endpoint.health import Health
from gpuhook.cluster.kubelet_endpoint.listener import Listener
from gpuhook.cluster.vendors import cluster
from gpuhook.cluster.vendors.cluster import VendorCluster
from gpuhook.monitor import vendor_parts
from gpuhook.monitor.host.uevents import KernelEvents, listen
from gpuhook.monitor.machine import HostDevices
from gpuhook.monitor.vendors.survey import concerns_us

_SETTLE = 0.5  # seconds of quiet after a kernel event: a driver is loaded in many steps
_AWAY = 60.0  # seconds without NVML after SIGHUP, in which a driver can be unloaded
_SAY_AGAIN = 60.0  # seconds until the same application error is logged again


class DeviceMonitor:
    """All vendors' devices, and the listeners to their drivers.

    ``recovery``, ``interval`` and ``chosen`` (its ``vendors``) are as in the device plugin's
    ``settings.Settings``. ``changed`` is set at every change, ``arranged`` if the set of devices
    changed. The reader of these flags clears them.
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
        self._watched: dict[str, object] = {}  # by vendor: the devices of its listener
        self._kernel = self._kernel_events()
        self._present: set[str] = set()  # ids of all devices
        self._said: dict[tuple[str, str], float] = {}  # when application errors were logged
        self._events: dict[str, Mapping[str, Any]] = {}  # by device: its last error
        self._look_at = 0.0
        self._is_eager = False  # whether the next poll ignores pauses
        self.changed = self.arranged = True

    def _kernel_events(self) -> KernelEvents | None:
        """Return the listener for kernel events; None, with a message, if that isn't permitted."""
        try:
            return KernelEvents(listen())
        except OSError as error:
            why = f"The kernel's events can't be received ({error.strerror})"
            self._tell(f"{why}: changes are noticed later")
            return None

    def end(self) -> None:
        """Stop all listeners."""
        for listener in self._listeners.values():
            listener.stop()
        if self._kernel is not None:
            self._kernel.close()

    # For the loop ---------------------------------------------------------------------------

    def is_due(self) -> bool:
        """Tell whether ``tend`` is going to poll the host."""
        return self._clock() >= self._look_at

    def deadlines(self) -> list[float | None]:
        """Return the times at which work is due, None for never."""
        limits = [listener.deadline() for listener in self._listeners.values()]
        return [self._look_at, self._health.due(), *limits]

    def readers(self) -> list[Any]:
        """Return the readers to wait for; ``read`` takes those that are readable."""
        listening: list[Any] = [each for each in self._listeners.values() if each.fileno() >= 0]
        return listening if self._kernel is None else [*listening, self._kernel]

    def read(self, ready: Sequence[Any]) -> None:
        """Process the incoming events."""
        if self._kernel in ready:
            self._hear_kernel()
        for name, listener in self._listeners.items():
            if listener in ready:
                self._hear(name, listener.read())

    def tend(self) -> None:
        """Do all due work."""
        if self.is_due():
            self.look(eager=self._is_eager)
        due = self._health.due()
        if due is not None and self._clock() >= due:
            self._ask_again()
        for name, listener in self._listeners.items():
            self._hear(name, listener.tend(self._inventory(name)))
            for device in listener.silent & self._present:
                self._fall_ill(device, "the driver hangs when it is queried")

    def hang_up(self) -> None:
        """Close NVML for a while, so that a driver can be unloaded, and poll again."""
        self._tell("SIGHUP: looking for devices again; no driver is kept open for a minute")
        for listener in self._listeners.values():
            listener.let_go(_AWAY)
        self.look(eager=True)
        self.changed = True
        troubled = self._health.reasons()
        if troubled:
            self._note_well(self._health.asked(self.machine.ask(troubled)))

    # The machine ------------------------------------------------------------------------------

    def look(self, *, eager: bool = False) -> None:
        """Poll all vendors, and handle the changes."""
        self._is_eager = False
        changed = self.machine.refresh(eager=eager)
        self._look_at = self._clock() + self._interval
        if not changed:
            return
        self.changed = self.arranged = True
        here = {device.id for _, inventory in self.machine.found for device in inventory.devices}
        # A device that disappears and comes back was reset, or its driver was reloaded.
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
        """Schedule a poll soon, after the current changes have settled."""
        self._look_at = min(self._look_at, self._clock() + _SETTLE)

    def _hear_kernel(self) -> None:
        """Schedule a poll for kernel events that concern our devices."""
        if self._kernel is None:
            return
        for event in [*self._kernel.read()]:
            if not event or concerns_us(event, self._config):
                self.look_soon()
                self._is_eager = True

    def _watch(self, names: Any, inventory: Any) -> None:
        """Ensure that a listener for a vendor's errors runs for its current devices."""
        module = vendor_parts.events(names) if self.cluster(names).listens else None
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
        """Return a vendor's inventory, None if it has none; then no listener runs."""
        for vendor, inventory in self.machine.found:
            if name == vendor.names.NAME:
                return inventory
        return None

    def cluster(self, names: Any) -> VendorCluster:
        """Return a vendor's functions for clusters, with its settings."""
        return cluster.of(names, self._chosen.get(names.NAME))

    # How devices are ----------------------------------------------------------------------------

    def reasons(self) -> dict[str, str]:
        """Return why devices are unhealthy, by id: their own failure, else their whole device's.

        Otherwise the driver's failure, which affects all its devices.
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
        """Return the error that made a device unhealthy, as its driver reported it; {} for none."""
        return self._events.get(device, {}) if device in self._health.reasons() else {}

    def _hear(self, name: str, events: Sequence[Mapping[str, Any]]) -> None:
        """Process a listener's events."""
        module, inventory = self._listeners[name].module, self._inventory(name)
        if inventory is None:
            return
        known = {device.id for device in inventory.devices}
        for event in events:
            if "lost" not in event:
                self._hear_error(module, inventory, event)
            elif event["lost"] in known:
                self._fall_ill(event["lost"], f"it is lost: {event['why']}", event)

    def _hear_error(
        self, module: vendor_parts.EventsModule, inventory: Any, event: Mapping[str, Any]
    ) -> None:
        what, words = module.judge(event, self._chosen.get(inventory.vendor))
        devices = module.concerned(inventory, event)
        for device in devices:
            if what == vendor_parts.FATAL:
                self._fall_ill(device.id, words, event)
            elif what == vendor_parts.APPLICATION:
                self._say_application(device.id, words)
        if what == vendor_parts.FATAL:
            if not devices:
                gpu = event.get("gpu") or "unknown"
                self._tell(f"{words} on a device that isn't present ({gpu})")
            self.look_soon()

    def _say_application(self, device: str, words: str) -> None:
        """Log an application's failure, with a rate limit: one may fail all the time."""
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
        """Query the drivers of devices whose quiet time is over."""
        answering = self.machine.ask(self._health.reasons())
        self._note_well(self._health.asked(answering))
        self._look_at = self._clock()  # for other changes that the driver reported

    def _note_well(self, devices: Sequence[str]) -> None:
        for device in devices:
            self._tell(f"{device} is healthy again")
            self._events.pop(device, None)
            self.changed = True
        if devices:
            for listener in self._listeners.values():
                listener.silent.difference_update(devices)
                listener.restart()  # a lost device was no longer listened to

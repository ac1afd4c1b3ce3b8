"""The device plugin's supervisor: monitors the host, and sends states to the server process.

It also generates CDI specs and fills the driver folder, in children, before containers use them.
"""

from collections.abc import Callable, Container
from functools import partial

from gpuhook.base.config.model import Config
from gpuhook.base.errors import listed
from gpuhook.cluster.device_plugin import documents
from gpuhook.cluster.device_plugin.resources import resources
from gpuhook.cluster.device_plugin.settings import CDI_ANNOTATIONS, CDI_CRI, MOUNTS, Settings
from gpuhook.cluster.device_plugin.state import PluginState
from gpuhook.cluster.kubelet_endpoint import supervisor
from gpuhook.cluster.kubelet_endpoint.device_monitor import DeviceMonitor
from gpuhook.cluster.kubelet_endpoint.supervisor import EndpointSupervisor, Signals, tell
from gpuhook.monitor.followed import FollowedConfig
from gpuhook.monitor.host.child import BackOff
from gpuhook.monitor.service_metrics import Calls

_WHILE_BAD = (5.0, 600.0)  # seconds until a failed chore is retried: first, maximum
METRICS = "gpuhook_device_plugin_allocation"  # the start of its metrics' names


def run(settings: Settings, config: Config, followed: FollowedConfig | None = None) -> int:
    """Offer the host's devices, as ``supervisor.run``; return the exit status.

    1 if no driver works at the start and fail-on-init-error is set.
    """
    return supervisor.run(lambda signals: PluginSupervisor(settings, config, signals, followed))


Work = Callable[[documents.Chore], bool]


def _chores(settings: Settings) -> list[Work]:
    """Return the work to do when the host's devices have changed, before containers use them."""
    strategies = {*settings.device_list_strategy}
    found: list[Work] = [documents.bring] if {CDI_CRI, CDI_ANNOTATIONS} & strategies else []
    return [*found, documents.keep_driver_folder] if MOUNTS in strategies else found


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


class PluginSupervisor(EndpointSupervisor):
    """The supervisor of the device plugin."""

    def __init__(
        self,
        settings: Settings,
        config: Config,
        signals: Signals,
        followed: FollowedConfig | None = None,
    ) -> None:

        def serve(fd: int) -> int:
            # gRPC is imported only here: it has threads, and a process with them can't fork.
            from gpuhook.cluster.device_plugin import server  # noqa: PLC0415

            return server.PluginServer(settings, fd, tell).run()

        super().__init__(
            signals,
            DeviceMonitor(config, settings.recovery, settings.interval, settings.vendors, tell),
            serve,
            Calls(METRICS, "Allocations", ("resource",)),
            settings.metrics_listen,
            [settings.kubelet_folder],
            followed,
        )
        self.needs_devices = settings.fail_on_init_error
        self._settings = settings
        self._config = config
        self._state: PluginState | None = None
        self._warnings: list[str] = []
        self._told: dict[str, str] = {}  # logged reasons why devices are unhealthy
        self._chores = [
            _RetryTask(partial(self._do, each), self._clock) for each in _chores(settings)
        ]
        self._mps: tuple[bool, object] | None = None  # whether its daemon ran, and its state

    def _look(self) -> None:
        self._look_at_mps()
        self._observed.look(eager=True)

    def _work(self) -> list[float | None]:
        observed = self._observed
        if observed.is_due():
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
        return [chore.at for chore in self._chores]

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
        present = machine.present
        return work(documents.Chore(self._settings, self._config, present, failing, tell))

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

    def _tell_reasons(self, state: PluginState, said: Container[str]) -> None:
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

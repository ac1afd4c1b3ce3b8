"""The devices of all vendors on this host, polled at little cost.

While nothing has changed, a poll costs a few stat calls and doesn't query the driver. A vendor
that is absent, or whose driver fails, is queried again after a change in its fingerprint, after a
growing pause, or on request.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from gpuhook.base.config.model import Config
from gpuhook.base.errors import DriverError, GpuhookError, NoDriverError
from gpuhook.core import contract
from gpuhook.core.inventory import cache, fingerprint
from gpuhook.core.inventory.model import Inventory
from gpuhook.monitor import vendor_parts
from gpuhook.monitor.host.child import BackOff
from gpuhook.vendors import registry

Found = tuple[contract.Vendor, Inventory]
Links = dict[str, Mapping[str, int]]

_PAUSES = (30.0, 600.0)  # seconds until a failing driver is queried again: the first, the longest


class InventoryPending(Exception):  # noqa: N818 - no error: what was found before stays
    """Raised by a ``follow`` function that has no current inventory of the vendor yet."""


@dataclass
class _PollResult:
    """The result of the last poll of one vendor, and the time of the next one.

    ``cache_key`` is the fingerprint with which the driver failed. ``inventory`` is the last one and
    still contains lost devices, whose ids are in ``lost``. ``failure`` says why it may be outdated.
    ``linked`` identifies the devices and driver for which ``links`` were queried.
    """

    vendor: contract.Vendor
    loaded: cache.LoadedInventory | None = None
    inventory: Any = None
    lost: list[str] = field(default_factory=list)
    failure: DriverError | None = None
    cache_key: list[Any] = field(default_factory=list)
    back_off: BackOff = field(default_factory=lambda: BackOff(*_PAUSES))
    again: float = 0.0
    links: Links = field(default_factory=dict)
    linked: object = None

    def wait(self, now: float) -> None:
        """Schedule the next query after a longer pause than the last one."""
        self.again = now + self.back_off.grow()


class HostDevices:
    """The vendors with devices on this host; ``tell`` gets a sentence for each change.

    ``follow`` works as ``inventory.cache.follow``, and may raise InventoryPending. Without
    ``linked``, the proximity of devices isn't queried.
    """

    def __init__(
        self,
        config: Config,
        tell: Callable[[str], None],
        clock: Callable[[], float],
        *,
        follow: Callable[
            [Config, Any, cache.LoadedInventory | None], cache.LoadedInventory
        ] = cache.follow,
        linked: bool = True,
    ) -> None:
        self._config = config
        self._tell = tell
        self._clock = clock
        self._follow = follow
        self._linked = linked
        self._seen = {
            name: _PollResult(contract.load(names))
            for name, names in registry.all_vendors(config).items()
        }

    @property
    def found(self) -> list[Found]:
        """Each vendor with its inventory, in the vendors' order."""
        return [
            (seen.vendor, seen.inventory)
            for seen in self._seen.values()
            if seen.inventory is not None
        ]

    @property
    def present(self) -> list[Found]:
        """Each vendor with its inventory as the driver reported it, without remembered devices."""
        return [
            (seen.vendor, seen.loaded.inventory)
            for seen in self._seen.values()
            if seen.loaded is not None
        ]

    def lost(self) -> list[str]:
        """Return the ids of lost whole devices."""
        return [device for seen in self._seen.values() for device in seen.lost]

    @property
    def links(self) -> Links:
        """The proximity of devices, of all vendors."""
        return {device: near for seen in self._seen.values() for device, near in seen.links.items()}

    def failures(self) -> dict[str, DriverError]:
        """Return the failures of installed drivers, by vendor."""
        return {
            name: seen.failure
            for name, seen in self._seen.items()
            if seen.failure is not None and not isinstance(seen.failure, NoDriverError)
        }

    def why_nothing(self) -> DriverError | None:
        """Return why nothing was found: the first driver that fails or isn't installed."""
        if self.found:
            return None
        every = [seen.failure for seen in self._seen.values() if seen.failure is not None]
        return (list(self.failures().values()) or every)[0]

    def refresh(self, *, eager: bool = False) -> bool:
        """Poll all vendors; tell whether anything changed. ``eager`` ignores pauses."""
        news = [self._look(seen, eager=eager) for seen in self._seen.values()]
        return any(news)

    def ask(self, devices: Collection[str]) -> set[str]:
        """Query the drivers of these devices; return all of those vendors' devices that answer.

        Other changes that the drivers report take effect at the next poll.
        """
        answering: set[str] = set()
        for seen in self._seen.values():
            asked = seen.inventory.devices if seen.inventory is not None else ()
            if not any(device.id in devices for device in asked):
                continue
            try:
                seen.loaded = cache.follow(self._config, seen.vendor, ask=True)
            except DriverError as error:
                self._tell(f"{seen.vendor.names.TITLE}: {error}")
                continue
            seen.again = 0.0
            here = seen.loaded.inventory.devices
            answering |= {device.id for device in here if not device.state}
        return answering

    # One vendor -----------------------------------------------------------------------------

    def _look(self, seen: _PollResult, *, eager: bool) -> bool:
        before = seen.inventory, str(seen.failure), seen.lost
        if not self._is_worth_it(seen, eager=eager):
            return False
        try:
            loaded = self._follow(self._config, seen.vendor, seen.loaded)
        except InventoryPending:
            return False
        except DriverError as error:
            self._fail(seen, error)
            return (seen.inventory, str(seen.failure), seen.lost) != before
        if seen.failure is not None:
            seen.failure = None
            seen.back_off.reset()
        if loaded.inventory.lost:
            seen.wait(self._clock())
        else:
            seen.back_off.reset()
        seen.loaded = loaded
        seen.inventory = loaded.inventory.remembering(before[0]) if before[0] else loaded.inventory
        here = {device.id for device in loaded.inventory.devices}
        every = seen.inventory.devices
        seen.lost = [each.id for each in every if not each.parent and each.id not in here]
        if seen.inventory != before[0]:
            self._tell(f"{seen.vendor.names.TITLE}: {seen.inventory.sentence()}")
            if self._linked:
                self._ask_links(seen)
        return (seen.inventory, str(seen.failure), seen.lost) != before

    def _is_worth_it(self, seen: _PollResult, *, eager: bool) -> bool:
        if eager or self._clock() >= seen.again:
            return True
        if (
            seen.failure is None and seen.loaded is not None and seen.back_off.pause
        ):  # a device is lost
            return not seen.loaded.is_same(self._config)
        if seen.failure is not None:
            return seen.cache_key != fingerprint.of(self._config, seen.vendor)
        return True

    def _fail(self, seen: _PollResult, error: DriverError) -> None:
        """Record that a driver is absent or fails; the last loaded inventory is dropped."""
        absent = isinstance(error, NoDriverError)
        gone = absent and seen.inventory is not None
        if gone or (not absent and str(error) != str(seen.failure)):
            self._tell(f"{seen.vendor.names.TITLE}: {error}")
        if absent:
            seen.inventory, seen.links, seen.linked = None, {}, None
        seen.lost = []
        seen.loaded, seen.failure = None, error
        seen.cache_key = fingerprint.of(self._config, seen.vendor)
        seen.wait(self._clock())

    def _ask_links(self, seen: _PollResult) -> None:
        """Query the proximity of devices, once for each set of devices and driver."""
        inventory = seen.inventory
        module = vendor_parts.links(seen.vendor.names)
        whole = sorted(device.id for device in inventory.devices if not device.parent)
        if module is None or seen.linked == (inventory.version, whole):
            return
        seen.linked = (inventory.version, whole)
        try:
            seen.links = dict(module.links(self._config, inventory))
        except GpuhookError as error:
            seen.links = {}
            self._tell(f"{seen.vendor.names.TITLE}: the links between devices are unknown: {error}")

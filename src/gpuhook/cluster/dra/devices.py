"""The devices of this node as claims name them, each with its current failure.

The code is the same as for ``gpuhook dra --dry-run``. Publishing and preparing devices both use
these results, so that they agree.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpuhook.base.config.model import Config
from gpuhook.cluster.dra import slices as dra
from gpuhook.cluster.dra.slices import Choices, HealthProblem, SliceDriver
from gpuhook.cluster.kubelet_endpoint.device_monitor import DeviceMonitor
from gpuhook.cluster.vendors import slices
from gpuhook.core.cdi.names import is_device
from gpuhook.core.contract import Vendor
from gpuhook.core.inventory.model import Device, Inventory
from gpuhook.monitor.ledger.records import Records


@dataclass(frozen=True)
class ClaimableDevice:
    """A device that claims may name.

    ``name`` is the name in the slice and ``driver`` the driver's; ``vendor`` is the vendor's name
    and ``kind`` its CDI kind (nvidia.com/gpu). ``id`` is the inventory's id, such as the UUID, and
    ``device`` that device: "" and None for one that could be created, or is lost. ``cdi`` is its
    qualified name in the vendor's own CDI specs ("": none). ``parent`` is the id of the device that
    it is a part of. ``memory`` is its size in bytes, 0 if unknown. ``reason`` says why it shouldn't
    be allocated now ("": it can be). ``taint`` and ``value`` are the taint's key, without the
    driver's domain, and its value. ``is_lost`` means that it can't be reached.
    ``is_withheld`` means that MPS shares it on this node, so that claims can't get it.
    """

    name: str
    driver: str
    vendor: str
    kind: str
    id: str = ""
    device: Device | None = None
    cdi: str = ""
    parent: str = ""
    memory: int = 0
    reason: str = ""
    taint: str = ""
    value: str = ""
    is_lost: bool = False
    is_withheld: bool = False


class DeviceRegistry:
    """All devices of all vendors, updated by the supervisor's loop, which calls ``tend``.

    ``look``, ``drivers`` and ``objects`` never query a driver or wait: they return known data. The
    supervisor forks, so callers must not have threads in its process.
    """

    def __init__(
        self,
        config: Config,
        choices: Choices,
        tell: Callable[[str], None],
        *,
        recovery: float = 300.0,
        interval: float = 30.0,
        chosen: Mapping[str, Any] | None = None,
    ) -> None:
        self.config = config
        self.choices = choices
        self.observed = DeviceMonitor(config, recovery, interval, chosen or {}, tell, linked=False)
        self._tell = tell
        self._warnings: list[str] = []
        self._drivers: dict[str, SliceDriver] = {}
        self._troubled: dict[str, SliceDriver] = {}
        self._known: list[ClaimableDevice] = []
        self._names: dict[str, None] = {}  # of drivers
        self._records = Records(config.state_dir)
        self._shared: set[tuple[str, str]] = set()  # by MPS: vendors and the inventory's ids

    def tend(self) -> bool:
        """Do all due work; tell whether the devices or their health changed."""
        observed = self.observed
        observed.tend()
        if observed.arranged:
            observed.arranged = False
            self._arrange()
        record = self._records.mps()
        shared = {(each.vendor, each.unit) for each in record.devices} if record else set()
        if shared != self._shared:
            self._shared = shared
            observed.changed = True
        if not observed.changed:
            return False
        observed.changed = False
        troubled = dra.troubled(self._drivers, self._troubles())
        self._troubled = dra.withheld(troubled, shared)
        self._known = _known(self._troubled)
        return True

    def look(self) -> list[ClaimableDevice]:
        """Return all currently known devices."""
        return self._known

    def drivers(self) -> Sequence[str]:
        """Return the names of all drivers of this node, including those that failed since."""
        return [*self._names]

    def objects(self, kubernetes: tuple[int, int]) -> list[dict[str, Any]]:
        """Return the DeviceClasses and ResourceSlices, with taints, as --dry-run prints them.

        For that version of Kubernetes.
        """
        return dra.rendered(self._troubled, replace(self.choices, kubernetes=kubernetes))

    def found(self, known: ClaimableDevice) -> tuple[Vendor, Inventory]:
        """Return a device's vendor, and the inventory that contains it."""
        return self._troubled[known.driver].vendors[known.name]

    def attributes(self, driver: str, name: str) -> dict[str, Any]:
        """Return a device's attributes, as its slice has them."""
        its = self._troubled[driver]
        return dra.attributes(its, its.devices[name])

    def failure(self, known: ClaimableDevice) -> str:
        """Return the failure of a device's driver as a whole, "" if it answers."""
        failure = self.observed.machine.failures().get(known.vendor)
        return "" if failure is None else failure.cause

    def _arrange(self) -> None:
        """Describe the devices again; queries drivers in children."""
        found = self.observed.machine.found
        self._drivers, warnings = dra.described(found, self.choices, self.config)
        self._names.update(dict.fromkeys(self._drivers))
        for warning in warnings:
            if warning not in self._warnings:
                self._tell(warning)
        self._warnings = warnings

    def _troubles(self) -> dict[str, HealthProblem]:
        vendors = {
            device.id: vendor.names
            for vendor, inventory in self.observed.machine.found
            for device in inventory.devices
        }
        found = {}
        for device, reason in self.observed.reasons().items():
            event = self.observed.event(device)
            its = slices.of(vendors[device])
            found[device] = HealthProblem(reason, *its.taint(event), its.effect(event))
        return found


def _known(drivers: Mapping[str, SliceDriver]) -> list[ClaimableDevice]:
    found = []
    for driver in drivers.values():
        for each in driver.devices.values():
            vendor, inventory = driver.vendors[each.name]
            device = next((one for one in inventory.devices if one.id == each.id), None)
            kind = str(vendor.names.KIND)
            name = each.id if is_device(each.id) else device.label if device else ""
            found.append(
                ClaimableDevice(
                    each.name,
                    driver.name,
                    vendor.names.NAME,
                    kind,
                    each.id if device else "",
                    device,
                    f"{kind}={name}" if device else "",
                    device.parent if device else "",
                    each.capacity.get("memory", 0),
                    each.reason,
                    each.taint if each.reason else "",
                    each.value if each.reason else "",
                    bool(each.reason) and each.taint == slices.of(vendor.names).lost_taint,
                    each.withheld,
                )
            )
    return found

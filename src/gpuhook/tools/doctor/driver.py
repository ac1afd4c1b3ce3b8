"""Check of drivers whose devices are found from kernel information and are device nodes."""

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from gpuhook.base.errors import DriverError
from gpuhook.core import contract
from gpuhook.core.contract import Vendor
from gpuhook.tools.doctor import devices
from gpuhook.tools.doctor.case import Case, VendorChecks
from gpuhook.tools.doctor.devices import IsOurs
from gpuhook.tools.doctor.finding import Finding, failure, ok, warning
from gpuhook.tools.doctor.machine import Machine


@dataclass(frozen=True)
class DriverCheck:
    """A check of a vendor's driver: whether it is loaded, and whether its devices are usable.

    ``check`` is the name of its findings, ``has`` the sentence on its devices. ``is_ours``
    recognises a device on the PCI bus: a host with none needs no driver, unless ``by_root`` is set
    and the configuration names a root for it. ``without`` is the remedy for a driver without
    devices, "" if that is fine. ``udev`` is the remedy for missing nodes, or inaccessible ones if
    the driver ``is_for_everybody``. ``more`` yields further findings from the machine below the
    driver root, and its inventory.
    """

    vendor: Vendor
    check: str
    is_ours: IsOurs = lambda _: False
    has: str = "{title}'s driver {version} has {count} devices"
    by_root: bool = False
    without: str = ""
    udev: str = devices.UDEV
    is_for_everybody: bool = False
    more: Callable[[Machine, Any], Iterable[Finding]] = lambda _, __: ()

    @property
    def __name__(self) -> str:
        return self.check

    def __call__(self, case: Case) -> Iterator[Finding]:
        """Yield the findings, none for a host without devices of the vendor."""
        driver = Machine(case.machine.path(self.vendor.root(case.config)))
        names = self.vendor.names
        try:
            inventory = discovered(self.vendor, case)
        except DriverError as error:
            if self._is_expected(case, driver):
                yield failure(self.check, error.cause, error.remedy)
            return
        count = len(inventory.devices)
        if not count and self.without:
            yield warning(self.check, f"{names.TITLE}'s driver has no device", self.without)
            return
        if count:
            words = {"title": names.TITLE, "version": inventory.version, "count": count}
            yield ok(self.check, self.has.format(**words))
        yield from devices.missing_nodes(self.check, names.TITLE, inventory.missing(), self.udev)
        yield from devices.unusable(self.check, names.NOUN, names.LOST_REMEDY, inventory.devices)
        if self.is_for_everybody:
            yield from devices.closed_nodes(self.check, inventory, self.udev)
        yield from self.more(driver, inventory)

    def _is_expected(self, case: Case, driver: Machine) -> bool:
        if self.by_root and case.config.own_driver_root(self.vendor.names.NAME):
            return True
        return any(devices.is_on_bus(place, self.is_ours) for place in (driver, case.machine))


def discovered(vendor: Vendor, case: Case) -> Any:
    """Return the inventory of the vendor's driver on the examined host; DriverError."""
    config = copy.copy(case.config)
    root = case.machine.path(vendor.root(config))
    config.driver_roots = (*config.driver_roots, f"{vendor.names.NAME}={root}")  # the last counts
    return vendor.discover(config)


def default_checks(names: ModuleType) -> VendorChecks:
    """Return the checks of a vendor without a module ``doctor``.

    Any PCI device with its PCI vendor needs the driver.
    """
    ours = f"0x{names.PCI_VENDOR}"
    check = f"{names.NAME.replace('_', '-')}-devices"
    return VendorChecks(
        (
            DriverCheck(
                contract.load(names), check, lambda fact: fact("vendor") == ours, by_root=True
            ),
        )
    )

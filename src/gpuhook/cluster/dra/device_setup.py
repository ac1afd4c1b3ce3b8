"""Changes to devices for a claim, in addition to its CDI spec, and their rollback.

The vendor's ``claim_config`` defines which settings are changed and which programs are started. All
checks come first. The claim's record has the previous values before anything is changed.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from gpuhook.base.errors import DriverError, GpuhookError, NoDriverError, RequestError
from gpuhook.cluster import vendor_parts
from gpuhook.cluster.dra.allocation_result import AllocationResult
from gpuhook.cluster.dra.devices import DeviceRegistry
from gpuhook.cluster.vendor_parts import ClaimConfig
from gpuhook.core.inventory.model import Device
from gpuhook.core.records import leases, records
from gpuhook.monitor.ledger import settings
from gpuhook.monitor.ledger.records import ChangedSetting, OwnerRecord
from gpuhook.monitor.ledger.settings import SettingsLedger
from gpuhook.vendors import registry

_FOLDER = "dra"  # for claims' programs, in the state folder; a socket's path must be short
_VENDOR = "vendor"  # the key of an effect that this module adds

Effect = dict[str, Any]
Tell = Callable[[str], None]


class Effects:
    """The changes of devices for claims."""

    def __init__(self, devices: DeviceRegistry) -> None:
        self._devices = devices
        self._config = devices.config
        self._settings = SettingsLedger(self._config, self._inventory)

    def planned(
        self, given: Sequence[AllocationResult], driver: str, uid: str
    ) -> tuple[tuple[ChangedSetting, ...], list[Effect]]:
        """Return the settings to change and the programs to start for a claim.

        A GpuhookError if any of it isn't possible. Nothing is changed yet.
        """
        by_vendor: dict[str, list[tuple[Device, Any]]] = {}
        for each in given:
            if each.plan:
                pair = each.given.device, each.plan
                by_vendor.setdefault(each.held.vendor, []).append(pair)
        changed: tuple[ChangedSetting, ...] = ()
        effects: list[Effect] = []
        for vendor, wanted in by_vendor.items():
            module, inventory = self._module(vendor), self._inventory(vendor)
            folder = f"{self._config.state_dir}/{_FOLDER}/{vendor}-{uid}"
            made = module.effects(self._config, inventory, wanted, folder)
            effects += [{_VENDOR: vendor, "driver": driver, **effect} for effect in made]
            changed += self._changes(vendor, module, wanted)
        return changed, effects

    def _changes(
        self, vendor: str, module: ClaimConfig, wanted: Sequence[tuple[Device, Any]]
    ) -> tuple[ChangedSetting, ...]:
        values = settings.wanted_of([(device, module.settings(plan)) for device, plan in wanted])
        found = self._settings.planned(vendor, values)
        driver = settings.module(self._config, vendor)
        for each in found:
            why = driver.refusal(each.name, each.before)
            if why:
                raise RequestError(
                    f"The {driver.title(each.name)} of {each.device} can't be changed: {why}",
                    "Claim another device, or leave out the configuration",
                )
        self._check_exclusive(vendor, [device for device, _ in wanted])
        return found

    def _check_exclusive(self, vendor: str, devices: Sequence[Device]) -> None:
        """Raise HeldError if a container has one of these devices exclusively."""
        names = registry.all_vendors(self._config)[vendor]
        if names.KIND not in self._config.exclusive:
            return
        wanted = {"given": [records.given(names, self._inventory(vendor), devices, ())]}
        every = records.read_every(self._config.state_dir, devices[0].label)
        leases.refuse(wanted, every, self._config.exclusive)  # protects: dra-exclusive

    def begin(self, record: OwnerRecord) -> list[tuple[list[str], dict[str, list[Any]]]]:
        """Make all changes of a record; return groups of device ids with their CDI edits.

        Changes that were already made are made again. A GpuhookError if one fails.
        """
        self._settings.apply(record.settings)
        found = []
        for effect in record.effects:
            vendor = effect[_VENDOR]
            edits = self._module(vendor).begin(self._config, self._inventory(vendor), effect)
            found.append((effect["devices"], edits))
        return found

    def undo(self, record: OwnerRecord, tell: Tell) -> None:
        """Roll back all changes of a record; a DriverError if that has to be tried again.

        ``tell`` gets a sentence for each change that can't be rolled back. Without a driver, its
        settings are gone anyway.
        """
        vendors = {each[_VENDOR] for each in record.effects}
        vendors |= {each.vendor for each in record.settings}
        failures = self._devices.observed.machine.failures()
        for vendor in vendors:
            if self._inventory(vendor) is None and vendor in failures:  # protects: dra-undone
                raise failures[vendor]
        try:
            for effect in record.effects:
                vendor = effect[_VENDOR]
                self._module(vendor).undo(self._config, self._inventory(vendor), effect)
            not_set = self._settings.restore(record.settings)
        except NoDriverError:
            return
        for _, failure in not_set:
            if not (failure.lost or failure.final):  # protects: dra-lost-holds-none
                raise DriverError(failure.cause, failure.remedy)
            tell(f"Claim {record.claim} is unprepared nevertheless: {failure.cause}")

    def look_after(self, claims: Iterable[OwnerRecord], tell: Tell) -> None:
        """Start programs of claims again that have ended by themselves."""
        for record in claims:
            for effect in record.effects:
                vendor = effect[_VENDOR]
                try:
                    module = self._module(vendor)
                    if module.look_after(self._config, self._inventory(vendor), effect):
                        self._settings.apply(record.settings)
                except GpuhookError as error:
                    tell(f"Claim {record.claim}: {error}")

    def _inventory(self, vendor: str) -> Any:
        for known, inventory in self._devices.observed.machine.found:
            if vendor == known.names.NAME:
                return inventory
        return None

    def _module(self, vendor: str) -> ClaimConfig:
        names = registry.all_vendors(self._config)[vendor]
        found = vendor_parts.claim_config(names)
        if found is None:
            raise RequestError(
                f"{names.TITLE}'s devices have no configuration", "Remove the configuration"
            )
        return found

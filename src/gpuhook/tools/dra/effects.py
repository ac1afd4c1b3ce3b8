"""What is done to devices for a claim in addition to its document, and how it is undone.

Settings of the devices are changed, and programs started, as the vendor's ``claim_config`` says.
All that can refuse is asked first; what was before is in the claim's record before anything is
changed.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from gpuhook.ground.errors import DriverError, GpuhookError, NoDriverError, RequestError
from gpuhook.start.inventory.model import Device
from gpuhook.start.records import leases, records
from gpuhook.tools.dra.allotted import Allotted
from gpuhook.tools.dra.devices import Devices
from gpuhook.tools.ledger import settings
from gpuhook.tools.ledger.records import Record, Setting
from gpuhook.tools.ledger.settings import Settings
from gpuhook.tools.vendors import parts
from gpuhook.tools.vendors.parts import ClaimConfig
from gpuhook.vendors import registry

_FOLDER = "dra"  # of claims' programs, in the state folder; a socket's path must not be long
_VENDOR = "vendor"  # the key of an effect that is ours

Effect = dict[str, Any]
Tell = Callable[[str], None]


class Effects:
    """What claims have done to devices."""

    def __init__(self, devices: Devices) -> None:
        self._devices = devices
        self._config = devices.config
        self._settings = Settings(self._config, self._inventory)

    def planned(
        self, given: Sequence[Allotted], driver: str, uid: str
    ) -> tuple[tuple[Setting, ...], list[Effect]]:
        """Return the settings to change and the programs to start for a claim.

        A GpuhookError where any of it can't be; nothing is changed.
        """
        by_vendor: dict[str, list[tuple[Device, Any]]] = {}
        for each in given:
            if each.plan:
                pair = each.given.device, each.plan
                by_vendor.setdefault(each.held.vendor, []).append(pair)
        changed: tuple[Setting, ...] = ()
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
    ) -> tuple[Setting, ...]:
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
        """Raise HeldError where a container has one of these devices for itself."""
        names = registry.known(self._config)[vendor]
        if names.KIND not in self._config.exclusive:
            return
        wanted = {"given": [records.given(names, self._inventory(vendor), devices, ())]}
        every = records.read_every(self._config.state_dir, devices[0].label)
        leases.refuse(wanted, every, self._config.exclusive)  # protects: dra-exclusive

    def begin(self, record: Record) -> list[tuple[list[str], dict[str, list[Any]]]]:
        """Do all that a record says; return the ids of devices, and CDI edits for each group.

        What is done already is done again. A GpuhookError where something can't be.
        """
        self._settings.apply(record.settings)
        found = []
        for effect in record.effects:
            vendor = effect[_VENDOR]
            edits = self._module(vendor).begin(self._config, self._inventory(vendor), effect)
            found.append((effect["devices"], edits))
        return found

    def undo(self, record: Record, tell: Tell) -> None:
        """Undo all that a record says; a DriverError where that is to be tried again.

        ``tell`` gets a sentence for what stays changed for good. Without a driver there is nothing
        left of what it was told.
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
            tell(f"Claim {record.claim} is put back all the same: {failure.cause}")

    def look_after(self, claims: Iterable[Record], tell: Tell) -> None:
        """Start again what has ended by itself."""
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
        names = registry.known(self._config)[vendor]
        found = parts.claim_config(names)
        if found is None:
            raise RequestError(
                f"Nothing can be configured of {names.TITLE}'s devices", "Remove the configuration"
            )
        return found

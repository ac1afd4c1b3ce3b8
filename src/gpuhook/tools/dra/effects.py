"""What is done to devices for a claim beside its document, by the vendor's ``claim_config``.

It is written down before it is begun, and undone before the record goes.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from gpuhook.ground.errors import GpuhookError, NoDriverError, RequestError
from gpuhook.start.inventory.model import Device
from gpuhook.tools.dra.allotted import Allotted
from gpuhook.tools.dra.devices import Devices
from gpuhook.tools.kubernetes.handed import FOLDER, Record
from gpuhook.tools.vendors import parts
from gpuhook.tools.vendors.parts import ClaimConfig
from gpuhook.vendors import registry

_VENDOR = "vendor"  # the key of an effect that is ours

Effect = dict[str, Any]


class Effects:
    """What claims have done to devices."""

    def __init__(self, devices: Devices) -> None:
        self._devices = devices
        self._config = devices.config

    def planned(self, given: Sequence[Allotted], driver: str, uid: str) -> list[Effect]:
        """Return what is to be done for a claim; RequestError where that can't be."""
        by_vendor: dict[str, list[tuple[Device, Any]]] = {}
        for each in given:
            if each.plan:
                pair = each.given.device, each.plan
                by_vendor.setdefault(each.held.vendor, []).append(pair)
        found: list[Effect] = []
        for vendor, wanted in by_vendor.items():
            folder = f"{self._config.state_dir}/{FOLDER}/{vendor}-{uid}"
            inventory = self._inventory(vendor)
            made = self._module(vendor).effects(inventory, wanted, folder)
            found += [{_VENDOR: vendor, "driver": driver, **effect} for effect in made]
        return found

    def check(self, effects: Iterable[Effect], others: Iterable[Record]) -> None:
        """Raise RequestError where another claim wants something else of the same device."""
        theirs = [(record, each) for record in others for each in record.effects]
        for effect in effects:
            module = self._module(effect[_VENDOR])
            for record, other in theirs:
                if other[_VENDOR] == effect[_VENDOR] and module.conflict(effect, other):
                    raise RequestError(
                        f"Claim {record.claim} has another configuration for the same device",
                        "Give both claims the same one, or other devices",
                    )

    def begin(self, effect: Effect) -> tuple[list[str], dict[str, list[Any]]]:
        """Do it; return the ids of its devices, and CDI edits for them."""
        vendor = effect[_VENDOR]
        edits = self._module(vendor).begin(self._config, self._inventory(vendor), effect)
        return effect["devices"], edits

    def undo(self, effect: Effect, others: Iterable[Record]) -> str:
        """Undo it, unless another claim wants the same.

        Return what stays otherwise for good, a sentence, "" for nothing. A DriverError while the
        driver fails: it is to be tried again. Without one there is nothing left of what it was
        told.
        """
        module = self._module(effect[_VENDOR])
        kept = {
            device
            for record in others
            for other in record.effects
            if other[_VENDOR] == effect[_VENDOR] and other["do"] == effect["do"]
            for device in other["devices"]
        }
        if kept.issuperset(effect["devices"]):
            return ""
        inventory = self._inventory(effect[_VENDOR])
        failure = self._devices.observed.machine.failures().get(effect[_VENDOR])
        if inventory is None and failure is not None:  # protects: dra-undone
            raise failure
        try:
            return module.undo(self._config, inventory, effect)
        except NoDriverError:
            return ""

    def look_after(self, records: Iterable[Record], tell: Callable[[str], None]) -> None:
        """Start again what has ended by itself."""
        for record in records:
            for effect in record.effects:
                try:
                    self._module(effect[_VENDOR]).look_after(self._config, effect)
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

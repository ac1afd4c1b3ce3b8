"""Device settings that owners change and restore, such as the compute mode.

The vendor's ``settings`` module calls the driver. The original value is saved in the owner's record
before anything is changed, so any process can restore it, even after kill -9.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from gpuhook.base.config.model import Config
from gpuhook.base.errors import DriverError, RequestError
from gpuhook.core.inventory.model import Device
from gpuhook.monitor import vendor_parts
from gpuhook.monitor.ledger.records import ChangedSetting
from gpuhook.vendors import registry

Values = Mapping[str, int]  # by name of the setting
Inventories = Callable[[str], Any]  # by vendor; None without its driver


class Difference(NamedTuple):
    """A setting that differs from what its owner set; ``value`` is the current one."""

    setting: ChangedSetting
    value: int


class SettingsLedger:
    """The settings of this host's devices; ``inventory`` returns a vendor's inventory."""

    def __init__(self, config: Config, inventory: Inventories) -> None:
        self._config = config
        self._inventory = inventory

    def planned(
        self, vendor: str, wanted: Mapping[str, Values], kept: Sequence[ChangedSetting] = ()
    ) -> tuple[ChangedSetting, ...]:
        """Return the changes to a vendor's devices, with the current values.

        ``wanted`` is keyed by the inventory's ids. ``kept`` are the owner's earlier changes: their
        original values are preserved. DriverError if the driver can't be queried.
        """
        before = {
            (device, name): value
            for device, values in self._read(vendor, wanted).items()
            for name, value in values.items()
        }
        for device, title in self._unread(vendor, wanted, before):  # protects: setting-read
            raise DriverError(
                f"The driver doesn't report the {title} of {device}",
                "See the kernel's log",
            )
        first = {(each.device, each.name): each.before for each in kept if each.vendor == vendor}
        before.update(first)  # protects: mps-first-mode
        return tuple(
            ChangedSetting(vendor, device, name, before.get((device, name), 0), value)
            for device, settings in wanted.items()
            for name, value in settings.items()
        )

    def _unread(
        self, vendor: str, wanted: Mapping[str, Values], known: Collection[tuple[str, str]]
    ) -> list[tuple[str, str]]:
        """Return the readable settings that the driver didn't report: device and title."""
        driver = module(self._config, vendor)
        every = [(device, name) for device, values in wanted.items() for name in values]
        return [
            (device, driver.title(name))
            for device, name in every
            if name in driver.READABLE and (device, name) not in known
        ]

    def apply(self, settings: Sequence[ChangedSetting]) -> None:
        """Change settings; DriverError if one can't be changed."""
        for vendor, its in _by_vendor(settings).items():
            wanted = _wanted({each: each.value for each in its})
            failures = self._write(vendor, wanted)
            if failures:
                first = failures[0]
                raise DriverError(first.cause, first.remedy)

    def restore(
        self, settings: Sequence[ChangedSetting]
    ) -> list[tuple[ChangedSetting, vendor_parts.UnchangedSetting]]:
        """Restore settings; return those that can't be restored, each with the reason.

        A setting that no longer has the value set here is kept: another program has changed it.
        DriverError if the driver can't be queried.
        """
        found = []
        for vendor, its in _by_vendor(settings).items():
            inventory = self._inventory(vendor)
            if inventory is None:
                continue  # without a driver no setting is left
            values = self._read(vendor, _wanted(dict.fromkeys(its, 0)))
            due = {(each.device, each.name): each for each in its if _is_ours(each, values)}
            failures = self._write(vendor, _wanted({each: each.before for each in due.values()}))
            found += [(due[failure.device, failure.name], failure) for failure in failures]
        return found

    def differences(self, settings: Sequence[ChangedSetting]) -> list[Difference]:
        """Return the settings that differ from what their owner set; DriverError on failure."""
        found = []
        for vendor, its in _by_vendor(settings).items():
            values = self._read(vendor, _wanted(dict.fromkeys(its, 0)))
            for each in its:
                value = values.get(each.device, {}).get(each.name, each.value)
                if value != each.value:
                    found.append(Difference(each, value))
        return found

    def _read(self, vendor: str, wanted: Mapping[str, Values]) -> Mapping[str, Values]:
        inventory = self._inventory(vendor)
        if inventory is None or not wanted:
            return {}
        return module(self._config, vendor).read(self._config, inventory, wanted)

    def _write(
        self, vendor: str, wanted: Mapping[str, Values]
    ) -> Sequence[vendor_parts.UnchangedSetting]:
        inventory = self._inventory(vendor)
        if inventory is None or not wanted:
            return ()
        return module(self._config, vendor).write(self._config, inventory, wanted)


def module(config: Config, vendor: str) -> vendor_parts.DeviceSettings:
    """Return the vendor's settings module; RequestError if it has none."""
    names = registry.all_vendors(config)[vendor]
    found = vendor_parts.settings(names)
    if found is None:
        raise RequestError(f"{names.TITLE}'s devices have no settings", "Remove the configuration")
    return found


def wanted_of(pairs: Sequence[tuple[Device, Values]]) -> dict[str, dict[str, int]]:
    """Return the settings of each device, by its id; RequestError for two values of one setting."""
    found: dict[str, dict[str, int]] = {}
    for device, values in pairs:
        its = found.setdefault(device.id, {})
        if any(its.get(name, value) != value for name, value in values.items()):
            raise RequestError(
                f"The claim has two configurations for the device {device.label}",
                "Give it one configuration",
            )
        its.update(values)
    return found


def _is_ours(setting: ChangedSetting, values: Mapping[str, Values]) -> bool:
    """Return whether a setting still is what its owner set; an unreadable one may be."""
    value = values.get(setting.device, {}).get(setting.name, setting.value)
    return value == setting.value != setting.before  # protects: anothers-change


def _by_vendor(settings: Sequence[ChangedSetting]) -> dict[str, list[ChangedSetting]]:
    found: dict[str, list[ChangedSetting]] = {}
    for each in settings:
        found.setdefault(each.vendor, []).append(each)
    return found


def _wanted(values: Mapping[ChangedSetting, int]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for setting, value in values.items():
        found.setdefault(setting.device, {})[setting.name] = value
    return found

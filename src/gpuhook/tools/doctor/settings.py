"""Check of the ledger: devices' settings against those that claims and MPS have set."""

import os
from collections.abc import Iterator
from typing import Any

from gpuhook.base.errors import GpuhookError
from gpuhook.core import contract
from gpuhook.core.inventory import cache
from gpuhook.monitor.ledger.records import MPS, OwnerRecord, Records
from gpuhook.monitor.ledger.settings import Difference, SettingsLedger, module
from gpuhook.tools.doctor.case import Case
from gpuhook.tools.doctor.finding import Finding, failure, note, ok, warning
from gpuhook.vendors import registry

_CHECK = "device-settings"
_REMEDIES = {MPS: "Run gpuhook mps start, which sets it again"}
_REMEDY = "It isn't put back when this claim ends; delete the claim's pods, and set it by hand"


def device_settings(case: Case) -> Iterator[Finding]:
    """Compare the device settings of claims and MPS with the driver's."""
    records = Records(case.config.state_dir)
    if os.path.isdir(records.folder) and not os.access(records.folder, os.R_OK | os.X_OK):
        yield note(
            _CHECK,
            f"{records.folder} says which settings of devices were changed, and only root reads it",
            "Run gpuhook doctor as root to have them compared with the driver's",
        )
        return
    try:
        records.check_readable()
    except GpuhookError as error:
        yield failure(_CHECK, error.cause, error.remedy)
    settings = SettingsLedger(case.config, lambda vendor: _inventory(case, vendor))
    try:
        changed = [each for each in records.current() if each.settings]
        found = [
            (record, each) for record in changed for each in settings.differences(record.settings)
        ]
    except GpuhookError as error:
        yield warning(_CHECK, f"Devices' settings can't be compared: {error.cause}", error.remedy)
        return
    for record, each in found:
        yield _differs(case, record, each)
    if changed and not found:
        count = sum(len(record.settings) for record in changed)
        yield ok(_CHECK, f"Settings of devices that claims and MPS changed: {count}, all as set")


def _differs(case: Case, record: OwnerRecord, found: Difference) -> Finding:
    setting = found.setting
    vendor = module(case.config, setting.vendor)
    now, value, before = (
        vendor.shown(setting.name, each) for each in (found.value, setting.value, setting.before)
    )
    return warning(
        _CHECK,
        f"The {vendor.title(setting.name)} of {setting.device} is {now}, and {record} has set it "
        f"to {value} (before that it was {before})",
        _REMEDIES.get(record.owner, _REMEDY),
    )


def _inventory(case: Case, vendor: str) -> Any:
    """Return a vendor's inventory; a DriverError without its driver."""
    names = registry.all_vendors(case.config)[vendor]
    return cache.get_inventory(case.config, contract.load(names))

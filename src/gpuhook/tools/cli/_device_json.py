"""Devices in the JSON output of gpuhook list, info and stats: one vocabulary for all of them."""

import re
from typing import Any

from gpuhook.core.inventory.model import Inventory

# UUIDs with the vendor's prefix: GPU-..., MIG-...
_UUID = re.compile(r"(?:[A-Z]+-)?[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)


def described(inventory: Inventory) -> list[dict[str, Any]]:
    """Return the devices of an inventory, each as docs/json.md describes."""
    details = inventory.details()
    return [
        {
            **identity(inventory.vendor, device.id, device.label),
            "model": device.model,
            "parent": device.parent,
            "mig_profile": "",
            "minor": None,
            "bus_id": device.bus_id,
            "memory_total_bytes": None,
            "state": device.state,
            "names": {kind: [*names] for kind, names in device.names.items()},
            "nodes": [*device.nodes],
            **details.get(device.id, {}),
        }
        for device in inventory.devices
    ]


def identity(vendor: str, device: str, label: str) -> dict[str, Any]:
    """Return the keys that identify a device.

    ``index`` is its number on the host, or in its parent: the last number of the label.
    """
    last = label.rpartition(":")[2]
    return {
        "vendor": vendor,
        "id": device,
        "uuid": device if _UUID.fullmatch(device) else None,
        "index": int(last) if last.isascii() and last.isdecimal() else None,
        "label": label,
    }


def drivers(inventories: list[Inventory]) -> list[dict[str, Any]]:
    """Return the driver of each vendor."""
    return [
        {"vendor": each.vendor, "driver_version": each.version, "root": each.root}
        for each in inventories
    ]


def lost(inventories: list[Inventory]) -> list[dict[str, Any]]:
    """Return the devices that have fallen off the bus; only their index is known."""
    return [
        {"vendor": inventory.vendor, "index": index}
        for inventory in inventories
        for index in inventory.lost
    ]

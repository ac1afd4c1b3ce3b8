"""Device memory used by containers, and their limits, from their cgroups.

The kernel's dmem controller reports it for any container, NVIDIA's driver for those with a limit.
The value covers the whole container, including memory that other processes allocate for it.
"""

import copy
import os
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

from gpuhook.base.cgroup import dmem
from gpuhook.base.config.model import Config
from gpuhook.base.errors import GpuhookError
from gpuhook.core.inventory.model import Inventory
from gpuhook.core.memory_limits import recorded
from gpuhook.core.records import records
from gpuhook.monitor.containers.device_users import RunningContainer
from gpuhook.vendors import registry

PATIENCE = 4.0  # timeout in seconds for a driver
DMEM, NVML = "dmem", "nvml"


class Memory(NamedTuple):
    """Device memory of a container in bytes, its limit (None for no limit), and the source."""

    used: int
    limit: int | None
    source: str


Found = dict[tuple[str, str], Memory]  # by the container's id and the device's


def look(
    containers: Iterable[RunningContainer],
    inventories: Collection[Inventory],
    config: Config,
    patience: float = PATIENCE,
) -> tuple[Found, str]:
    """Return the memory of containers with a record, and a sentence on missing values or ""."""
    found: Found = {}
    asked: dict[str, str] = {}  # a container's folder -> its id, for queries to the driver
    entries: dict[tuple[str, str], dict[str, Any]] = {}
    regions = {each.vendor: _regions(each) for each in inventories}
    counts = any(names for vendor in regions.values() for names in vendor.values())
    tree = ""
    for container in containers:
        if not counts and not (container.record or {}).get("limits"):
            continue  # nothing counts it, and hundreds of them would cost as much as all others
        place = _place(container)
        if place is None:
            continue
        tree, folder = place
        for vendor in regions.values():
            for device, (used, limit) in dmem.used(folder, vendor).items():
                if device in _devices(container):
                    found[container.name, device] = Memory(used, limit, DMEM)
        for entry in (container.record or {}).get("limits", ()):
            if (container.name, entry["id"]) not in found:
                asked[folder] = container.name
                entries[entry["vendor"], entry["id"]] = entry
    if not asked:
        return found, ""
    quick = copy.copy(config)
    quick.nvml_timeout = min(patience, config.nvml_timeout)
    try:
        limits = recorded(entries.values(), inventories, registry.all_vendors(config), quick)
        said = limits.used(tree, asked) if limits is not None else {}
    except GpuhookError as error:
        return found, f"The memory used by containers with limits is unknown: {error.cause}"
    for folder, uses in said.items():
        for device, (used, limit) in uses.items():
            found.setdefault((asked[folder], device), Memory(used, limit, NVML))
    return found, ""


def _devices(container: RunningContainer) -> set[str]:
    given = (container.record or {}).get("given", ())
    return {name for each in given for name in each["selected"]}


def _place(container: RunningContainer) -> tuple[str, str] | None:
    """Return the mount point of cgroup v2, and a recorded container's folder in it."""
    record = container.record
    if record is None:
        return None
    try:
        process = os.open(f"/proc/{container.pid}", os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if records.started(process) != record["started"]:
            return None
        return dmem.place_of(process, written=records.cgroups_of(record))
    except (OSError, GpuhookError):
        return None
    finally:
        os.close(process)


def _regions(inventory: Inventory) -> dict[str, list[str]]:
    """Return the memory regions of each device that has its own."""
    try:
        every = [*dmem.read(dmem.TREE, dmem.CAPACITY)]
    except OSError:
        return {}
    places = [device.bus_id for device in inventory.devices if not device.parent]
    return {
        device.id: [name for name in every if device.bus_id in name.split("/")]
        for device in inventory.devices
        if device.bus_id and not device.parent and places.count(device.bus_id) == 1
    }

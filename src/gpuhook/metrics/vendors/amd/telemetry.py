"""Telemetry of amdgpu's GPUs from sysfs; Documentation/gpu/amdgpu of the kernel."""

from gpuhook.base.container.rootfs import Rootfs
from gpuhook.core.inventory.model import Inventory
from gpuhook.monitor.vendors import sensors


def read(inventory: Inventory, asking: sensors.Asking) -> dict[str, sensors.Values]:
    """Return the values of each GPU that isn't partitioned, by its id."""
    return sensors.read(inventory, asking, _more)


def _more(root: Rootfs, folder: str) -> sensors.Values:
    """Return memory in bytes, and the fraction of time in which the GPU was busy."""
    busy = sensors.integer(root, f"{folder}/gpu_busy_percent")
    found = {
        "memory_total_bytes": sensors.integer(root, f"{folder}/mem_info_vram_total"),
        "memory_used_bytes": sensors.integer(root, f"{folder}/mem_info_vram_used"),
        "utilization": None if busy is None else busy / 100,
    }
    return {name: value for name, value in found.items() if value is not None}

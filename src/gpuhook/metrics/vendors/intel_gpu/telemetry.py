"""Telemetry of the GPUs of i915 and xe from sysfs: hwmon's sensors, and energy."""

from gpuhook.core.inventory.model import Inventory
from gpuhook.monitor.vendors import sensors


def read(inventory: Inventory, asking: sensors.Asking) -> dict[str, sensors.Values]:
    """Return the values of each GPU, by its id."""
    return sensors.read(inventory, asking)

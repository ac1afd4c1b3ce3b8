"""What i915 and xe say in sysfs of how their GPUs are: what hwmon has, and energy."""

from gpuhook.start.inventory.model import Inventory
from gpuhook.tools.vendors import sensors


def read(inventory: Inventory, asking: sensors.Asking) -> dict[str, sensors.Values]:
    """Return the values of each GPU, by its id."""
    return sensors.read(inventory, asking)

"""Gaudis for a cluster, by address, with the module ids that Habana's libraries look for.

Names and attributes are those of Intel's own DRA driver (gaudi.intel.com).
"""

from typing import Any

from gpuhook.base.container.rootfs import Rootfs
from gpuhook.cluster.vendors.cluster import VendorCluster
from gpuhook.cluster.vendors.slices import Slices, Value, device_name, why_not
from gpuhook.core.inventory.model import Device
from gpuhook.monitor.vendors import pci
from gpuhook.vendors.gaudi.vendor import MODULES, seats


class GaudiCluster(VendorCluster):
    """Whole devices."""

    nothing = "none"  # Habana's own hook reads "void" as all

    def variables(self, device: Device) -> dict[str, str]:
        numbers = seats(device)
        return {MODULES: numbers[0]} if numbers else {}


CLUSTER = GaudiCluster


class GaudiSlices(Slices):
    """Gaudis, named as by Intel's driver: by address and product."""

    driver = "gaudi.intel.com"

    def name(self, device: Device, root: Rootfs) -> str:
        return device_name(device.bus_id, pci.attribute(root, device.bus_id, "device"))

    def attributes(self, device: Device, inventory: Any, root: Rootfs) -> dict[str, Value]:
        complex_ = pci.complex_of(root, device.bus_id)
        return {
            "model": device.model,
            "healthy": not why_not(device, inventory),
            **({"pciRoot": complex_.rpartition(":")[2]} if complex_ else {}),
        }


SLICES = GaudiSlices

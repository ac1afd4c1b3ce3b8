"""Gaudis with the names and attributes of Intel's own DRA driver (gaudi.intel.com)."""

from typing import Any

from gpuhook.ground.container.rootfs import Rootfs
from gpuhook.start.inventory.model import Device
from gpuhook.tools.vendors import pci
from gpuhook.tools.vendors.slices import Slices, Value, device_name, why_not


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

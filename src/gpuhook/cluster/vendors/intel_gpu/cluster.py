"""Intel GPUs: resources as of Intel's device plugin, and devices as of its own DRA driver."""

from typing import Any

from gpuhook.base.container.rootfs import Rootfs
from gpuhook.cluster.vendors.cluster import VendorCluster
from gpuhook.cluster.vendors.slices import Slices, Value, device_name, why_not
from gpuhook.core.inventory.model import Device
from gpuhook.monitor.vendors import pci
from gpuhook.monitor.vendors.sensors import integer
from gpuhook.vendors import sysfs_devices
from gpuhook.vendors.intel_gpu.discover import DRIVERS, PRODUCTS
from gpuhook.vendors.sysfs_devices import driver_folder

_DOMAIN = "gpu.intel.com"


class IntelGpuCluster(VendorCluster):
    """GPUs and virtual functions, by address, because card numbers may change at a reboot."""

    resources = tuple(f"{_DOMAIN}/{driver}" for driver in DRIVERS)
    pci_vendor = "8086"
    pci_classes = ("0300", "0380")

    def id(self, device: Device) -> str:
        return next(iter(device.names.get("uid", ())), device.id)

    def resource(self, device: Device, root: Rootfs) -> str:
        old, *newer = DRIVERS
        folders = {driver: sysfs_devices.driver_folder(driver) for driver in newer}
        found = [each for each in newer if root.exists(f"{folders[each]}/{device.bus_id}")]
        return f"{_DOMAIN}/{(found or [old])[0]}"


CLUSTER = IntelGpuCluster


_FAMILIES = ("Data Center GPU Flex", "Data Center GPU Max", "Arc")  # prefixes of products
_DEVICES = "/sys/bus/pci/devices"
_LOCAL = "lmem_total_bytes"  # i915's; xe has no file for it
_WHOLE = 1000  # thousandths of a GPU


class IntelGpuSlices(Slices):
    """Intel GPUs, named as by Intel's driver: by address and product."""

    driver = "gpu.intel.com"

    def name(self, device: Device, root: Rootfs) -> str:
        return device_name(self.cluster.id(device))

    def attributes(self, device: Device, inventory: Any, root: Rootfs) -> dict[str, Value]:
        found = (each for each in DRIVERS if root.exists(f"{driver_folder(each)}/{device.bus_id}"))
        product = pci.attribute(root, device.bus_id, "device").lower()
        family, model = _family(PRODUCTS.get(product.removeprefix("0x"), ""))
        functions = pci.attribute(root, device.bus_id, "sriov_totalvfs")
        complex_ = pci.complex_of(root, device.bus_id)
        about: dict[str, Value] = {
            "type": "vf" if device.parent else "gpu",
            "model": model,
            "family": family,
            "driver": next(found, ""),
            "sriov": functions not in ("", "0"),
            "pciId": product,
            "pciAddress": device.bus_id,
            "pciRoot": complex_.rpartition(":")[2],
            "health": "Unhealthy" if why_not(device, inventory) else "Healthy",
        }
        return {name: value for name, value in about.items() if value != ""}

    def capacity(self, device: Device, inventory: Any, root: Rootfs) -> dict[str, int]:
        cards = [path.rpartition("/")[2] for path in device.nodes if "/card" in path]
        files = [f"{_DEVICES}/{device.bus_id}/drm/{card}/{_LOCAL}" for card in cards]
        memory = next((found for path in files if (found := integer(root, path))), 0)
        return {"millicores": _WHOLE, **({"memory": memory} if memory else {})}


def _family(product: str) -> tuple[str, str]:
    """Return a product's family and model in Intel's terms: Data Center Flex and Flex 170."""
    beginning = next((each for each in _FAMILIES if product.startswith(each)), "")
    if not beginning:
        return "", product
    words = beginning.replace(" GPU", "")
    model = product.removeprefix("Data Center GPU ").removeprefix("Arc ")
    return words, model


SLICES = IntelGpuSlices

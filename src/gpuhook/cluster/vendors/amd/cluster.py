"""AMD GPUs and partitions: resources, and the attributes of AMD's own DRA driver (gpu.amd.com).

Device names differ: AMD's driver builds them from the numbers of the nodes, which another GPU may
get after one is lost.
"""

from typing import Any

from gpuhook.base.container.rootfs import Rootfs
from gpuhook.cluster.vendors.cluster import VendorCluster
from gpuhook.cluster.vendors.slices import Slices, Value, device_name, version
from gpuhook.core.inventory.model import Device
from gpuhook.monitor.vendors import pci
from gpuhook.monitor.vendors.sensors import integer
from gpuhook.vendors.amd.discover import kfd_devices, partition_type
from gpuhook.vendors.amd.vendor import GPUS
from gpuhook.vendors.sysfs_devices import number


class AmdCluster(VendorCluster):
    """GPUs and partitions, each one of a resource."""

    pci_classes = ("", "0300", "0380", "1200")
    nothing = "none"  # AMD's own runtime would read "void" as the name of a GPU


CLUSTER = AmdCluster


_WHOLE = ("", "spx")


class AmdSlices(Slices):
    """AMD GPUs."""

    driver = "gpu.amd.com"

    def name(self, device: Device, root: Rootfs) -> str:
        return device_name("gpu", device.id)  # also for a partition

    def attributes(self, device: Device, inventory: Any, root: Rootfs) -> dict[str, Value]:
        profile = partition_type(root, f"{GPUS}/{device.bus_id}")
        product = device.model.removesuffix(profile).strip()
        whole = profile.partition("_")[0] in _WHOLE
        found: dict[str, Value] = {
            "type": "amdgpu" if whole else "amdgpu-partition",
            "deviceID": pci.attribute(root, device.bus_id, "device"),
            "productName": product.replace(" ", "_"),
            "pciAddr": device.bus_id,
            "partitionProfile": profile,
            **version("driverVersion", inventory.version),
        }
        numa = pci.numa(root, device.bus_id)
        if numa is not None:
            found["numaNode"] = numa
        return {name: value for name, value in found.items() if value != ""}

    def capacity(self, device: Device, inventory: Any, root: Rootfs) -> dict[str, int]:
        """Return a partition's share of its GPU's memory, and its own compute units."""
        sharing = sum(each.bus_id == device.bus_id for each in inventory.devices)
        total = integer(root, f"{GPUS}/{device.bus_id}/mem_info_vram_total")
        found = {"memory": (total or 0) // max(sharing, 1)}
        properties = kfd_devices(root).get(_render(device), {})
        simd, each = properties.get("simd_count", 0), properties.get("simd_per_cu", 0)
        if simd:
            found["simdUnits"] = simd
        if simd and each:
            found["computeUnits"] = simd // each
        return found


def _render(device: Device) -> int:
    """Return the minor of a device's render node, -1 if it has none."""
    found = (number(path.rpartition("/")[2], "renderD") for path in device.nodes)
    return next((each for each in found if each is not None), -1)


SLICES = AmdSlices

"""NPUs under the resource names of Huawei's device plugin.

The plugin has one name for a family of chips: Ascend910 for 910, 910B and 910C. Newer families, and
chips that the driver doesn't name, are npu, as in its newer versions. A vNPU's size is unknown
here, so vNPUs have one name for all sizes. Huawei has no DRA driver with names to follow, so claims
name devices by address.
"""

from gpuhook.base.container.rootfs import Rootfs
from gpuhook.cluster.vendors.cluster import VendorCluster
from gpuhook.cluster.vendors.slices import Slices, device_name
from gpuhook.core.inventory.model import Device

_DOMAIN = "huawei.com"
_FAMILIES = {
    "310": "Ascend310",
    "310B": "Ascend310B",
    "310P": "Ascend310P",
    "910": "Ascend910",
    "910B": "Ascend910",
    "910C": "Ascend910",
}
_OTHER = "npu"
_VIRTUAL = "vNPU"


class AscendCluster(VendorCluster):
    """NPUs, and vNPUs by their chip."""

    resources = tuple(dict.fromkeys(f"{_DOMAIN}/{name}" for name in (*_FAMILIES.values(), _OTHER)))

    def resource(self, device: Device, root: Rootfs) -> str:
        del root
        words = device.model.split()
        chip = words[1] if len(words) > 1 else ""
        name = f"{_DOMAIN}/{_FAMILIES.get(chip, _OTHER)}"
        return f"{name}-vnpu" if _VIRTUAL in words else name


CLUSTER = AscendCluster


class AscendSlices(Slices):
    """NPUs by address, because the driver may number them differently after a reboot."""

    def name(self, device: Device, root: Rootfs) -> str:
        if not device.bus_id or device.parent:
            return device_name(device.bus_id and f"npu-{device.bus_id}", device.id)
        return device_name("npu", device.bus_id)


SLICES = AscendSlices

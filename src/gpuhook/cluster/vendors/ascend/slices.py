"""NPUs and vNPUs, named by address, because Huawei has no DRA driver with names to follow."""

from gpuhook.base.container.rootfs import Rootfs
from gpuhook.cluster.vendors.slices import Slices, device_name
from gpuhook.core.inventory.model import Device


class AscendSlices(Slices):
    """NPUs by address, because the driver may number them differently after a reboot."""

    def name(self, device: Device, root: Rootfs) -> str:
        if not device.bus_id or device.parent:
            return device_name(device.bus_id and f"npu-{device.bus_id}", device.id)
        return device_name("npu", device.bus_id)


SLICES = AscendSlices

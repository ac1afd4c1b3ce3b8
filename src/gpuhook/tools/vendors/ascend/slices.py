"""NPUs and vNPUs, by where they are: Huawei has no DRA driver whose names could be kept."""

from gpuhook.ground.container.rootfs import Rootfs
from gpuhook.start.inventory.model import Device
from gpuhook.tools.vendors.slices import Slices, device_name


class AscendSlices(Slices):
    """NPUs by address, because the driver may number them otherwise after a reboot."""

    def name(self, device: Device, root: Rootfs) -> str:
        if not device.bus_id or device.parent:
            return device_name(device.bus_id and f"npu-{device.bus_id}", device.id)
        return device_name("npu", device.bus_id)


SLICES = AscendSlices

"""NPUs under the name that Intel's device plugin gives them."""

from gpuhook.container.rootfs import Rootfs
from gpuhook.inventory.model import Device
from gpuhook.vendors import cluster


class Cluster(cluster.Cluster):
    """NPUs by address: nodes may have other numbers after a reboot."""

    def id(self, device: Device) -> str:
        return device.bus_id or device.id

    def resource(self, device: Device, root: Rootfs) -> str:
        del device, root
        return "npu.intel.com/accel"

"""NPUs under the resource name of Intel's device plugin."""

from gpuhook.ground.container.rootfs import Rootfs
from gpuhook.start.inventory.model import Device
from gpuhook.tools.vendors.cluster import Cluster


class IntelNpuCluster(Cluster):
    """NPUs by address, because node numbers may change at a reboot."""

    def id(self, device: Device) -> str:
        return device.bus_id or device.id

    def resource(self, device: Device, root: Rootfs) -> str:
        del device, root
        return "npu.intel.com/accel"


CLUSTER = IntelNpuCluster

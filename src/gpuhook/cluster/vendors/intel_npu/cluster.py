"""NPUs under the resource name of Intel's device plugin."""

from gpuhook.base.container.rootfs import Rootfs
from gpuhook.cluster.vendors.cluster import VendorCluster
from gpuhook.core.inventory.model import Device


class IntelNpuCluster(VendorCluster):
    """NPUs by address, because node numbers may change at a reboot."""

    resources = ("npu.intel.com/accel",)
    pci_vendor = "8086"

    def id(self, device: Device) -> str:
        return device.bus_id or device.id

    def resource(self, device: Device, root: Rootfs) -> str:
        del device, root
        return self.resources[0]


CLUSTER = IntelNpuCluster

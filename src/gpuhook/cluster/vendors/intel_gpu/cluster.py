"""GPUs under the resource names of Intel's device plugin: those of their drivers."""

from gpuhook.base.container.rootfs import Rootfs
from gpuhook.cluster.vendors.cluster import Cluster
from gpuhook.core.inventory.model import Device
from gpuhook.vendors import sysfs_devices
from gpuhook.vendors.intel_gpu.discover import DRIVERS

_DOMAIN = "gpu.intel.com"


class IntelGpuCluster(Cluster):
    """GPUs and virtual functions, by address, because card numbers may change at a reboot."""

    def id(self, device: Device) -> str:
        return next(iter(device.names.get("uid", ())), device.id)

    def resource(self, device: Device, root: Rootfs) -> str:
        old, *newer = DRIVERS
        folders = {driver: sysfs_devices.driver_folder(driver) for driver in newer}
        found = [each for each in newer if root.exists(f"{folders[each]}/{device.bus_id}")]
        return f"{_DOMAIN}/{(found or [old])[0]}"


CLUSTER = IntelGpuCluster

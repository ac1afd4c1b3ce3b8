"""Discovery of Intel NPUs below a driver root, without opening a device.

/dev/accel has nodes of several vendors' devices, so only those count whose PCI device the driver
is bound to. A device has its node's number.
"""

from gpuhook.base.container.rootfs import Rootfs
from gpuhook.base.errors import NoDriverError
from gpuhook.core.inventory.model import Device, DeviceNode, Inventory
from gpuhook.vendors import sysfs_devices
from gpuhook.vendors.intel_npu import names

DRIVER = "intel_vpu"


def discover(path: str) -> Inventory:
    """Discover the devices below the driver root; DriverError if there is no driver."""
    return sysfs_devices.discover_below(names.TITLE, path, _discover)


def _discover(root: Rootfs) -> Inventory:
    if not root.exists(sysfs_devices.driver_folder(DRIVER)):
        raise NoDriverError("Intel's NPU driver isn't loaded", f"Run modprobe {DRIVER}")
    found = {
        number: folder
        for folder in sysfs_devices.devices(root, DRIVER)
        for number in sysfs_devices.numbered(root, f"{folder}/accel", "accel")
    }
    devices = tuple(_device(root, number, found[number]) for number in sorted(found))
    nodes = sysfs_devices.nodes(root, (path for device in devices for path in device.nodes))
    return Inventory(names.NAME, root.path, DRIVER, devices, nodes)


def _device(root: Rootfs, number: int, folder: str) -> Device:
    name, address = f"accel{number}", folder.rpartition("/")[2]
    called = {"index": (str(number),), "name": (name,), "bus_id": (address,)}
    path = f"/dev/accel/{name}"
    device = sysfs_devices.text(root, f"{folder}/device").removeprefix("0x")
    dev = sysfs_devices.text(root, f"{folder}/accel/{name}/dev")
    state = sysfs_devices.wrong_numbers(DeviceNode.of(path, root.stat(path)), dev)
    return Device(
        name, str(number), called, (path,), address, f"Intel NPU {device}".strip(), state=state
    )

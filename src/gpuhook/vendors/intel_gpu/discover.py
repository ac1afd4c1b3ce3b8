"""Discovery of Intel GPUs below a driver root, without opening a device.

A GPU is a PCI device that i915 or xe is bound to; other devices may be bound to a driver for
virtual machines, and have no nodes. GPUs are numbered by address. A virtual function is a part of
its GPU, so creating some changes no other GPU's number.
"""

from gpuhook.base.container.rootfs import Rootfs
from gpuhook.base.errors import NoDriverError
from gpuhook.core.inventory.model import Device, DeviceNode, Inventory
from gpuhook.vendors import sysfs_devices
from gpuhook.vendors.intel_gpu import names

DRIVERS = ("i915", "xe")
# PCI device -> the product, for servers and workstations.
PRODUCTS = {
    "0bd5": "Data Center GPU Max 1550", "0bda": "Data Center GPU Max 1100",
    "56c0": "Data Center GPU Flex 170", "56c1": "Data Center GPU Flex 140",
    "56a0": "Arc A770", "56a1": "Arc A750", "e20b": "Arc B580", "e20c": "Arc B570",
}  # fmt: skip


class _Gpu:
    """A device that is bound to one of the drivers: its folder, address, nodes and parent."""

    def __init__(self, root: Rootfs, folder: str) -> None:
        self.folder = folder
        self.address = folder.rpartition("/")[2]
        cards = sysfs_devices.numbered(root, f"{folder}/drm", "card")
        renders = sysfs_devices.numbered(root, f"{folder}/drm", "renderD")
        self.drm = [*(f"card{each}" for each in cards), *(f"renderD{each}" for each in renders)]
        self.device = sysfs_devices.text(root, f"{folder}/device").removeprefix("0x").lower()
        self.whole = _whole(root, folder)

    @property
    def uid(self) -> str:
        """Its name in Intel's cluster plugins: address and product."""
        return f"{self.address.replace(':', '-').replace('.', '-')}-0x{self.device}"

    @property
    def id(self) -> str:
        """The name of its card, if it has one."""
        cards = [name for name in self.drm if name.startswith("card")]
        return cards[0] if cards else self.uid


def discover(path: str) -> Inventory:
    """Discover the devices below the driver root; DriverError if there is no driver."""
    return sysfs_devices.discover_below(names.TITLE, path, _discover)


def _discover(root: Rootfs) -> Inventory:
    drivers = [name for name in DRIVERS if root.exists(sysfs_devices.driver_folder(name))]
    if not drivers:
        raise NoDriverError(
            "Intel's GPU driver isn't loaded", "Run modprobe i915 or, for newer GPUs, modprobe xe"
        )
    folders = [folder for driver in drivers for folder in sysfs_devices.devices(root, driver)]
    gpus = [gpu for gpu in (_Gpu(root, folder) for folder in folders) if gpu.drm]
    devices = tuple(_in_order(root, sorted(gpus, key=lambda gpu: _place(gpu.address))))
    nodes = sysfs_devices.nodes(root, (path for device in devices for path in device.nodes))
    return Inventory(names.NAME, root.path, " and ".join(drivers), devices, nodes)


def _in_order(root: Rootfs, gpus: list[_Gpu]) -> list[Device]:
    """Return the GPUs, each followed by its virtual functions."""
    addresses = {gpu.address for gpu in gpus}
    whole = [gpu for gpu in gpus if gpu.whole not in addresses]
    found = []
    for index, gpu in enumerate(whole):
        found.append(_device(root, gpu, str(index), {"index": (str(index),)}))
        parts = [each for each in gpus if each.whole == gpu.address]
        for number, part in enumerate(parts):
            label = f"{index}.{number}"
            found.append(_device(root, part, label, {"vf": (label,)}, gpu.id))
    return found


def _device(
    root: Rootfs, gpu: _Gpu, label: str, called: dict[str, tuple[str, ...]], parent: str = ""
) -> Device:
    called = {
        **called,
        "card": tuple(name for name in gpu.drm if name.startswith("card")),
        "uid": (gpu.uid,),
        "bus_id": (gpu.address,),
    }
    nodes = tuple(f"/dev/dri/{name}" for name in gpu.drm)
    model = f"Intel {PRODUCTS.get(gpu.device, f'GPU {gpu.device}')}".strip()
    state = next(filter(None, (_wrong(root, gpu, name) for name in gpu.drm)), "")
    return Device(gpu.id, label, called, nodes, gpu.address, model, parent, state)


def _wrong(root: Rootfs, gpu: _Gpu, name: str) -> str:
    path = f"/dev/dri/{name}"
    dev = sysfs_devices.text(root, f"{gpu.folder}/drm/{name}/dev")
    return sysfs_devices.wrong_numbers(DeviceNode.of(path, root.stat(path)), dev)


def _whole(root: Rootfs, folder: str) -> str:
    """Return the address of a virtual function's GPU, "" for a GPU itself."""
    try:
        return root.real_path(f"{folder}/physfn").rpartition("/")[2]
    except OSError:
        return ""


def _place(address: str) -> tuple[int, ...]:
    return tuple(int(part, 16) for part in address.replace(".", ":").split(":"))

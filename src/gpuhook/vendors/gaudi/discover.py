"""Discovery of Gaudi devices below a driver root, without opening a device.

/sys/bus/pci/drivers/habanalabs/ADDRESS is a device. Its folder accel gives the N of its nodes
/dev/accel/accelN and accel_controlDN, infiniband_verbs its /dev/infiniband/uverbsM, and
module_id its seat on the board. The number N may be another driver's device at the next boot; a
seat is the same at every boot. Source: habanalabs driver, sysfs ABI
(Documentation/ABI/testing/sysfs-driver-habanalabs).
"""

from gpuhook.base.container.rootfs import Rootfs
from gpuhook.base.errors import NoDriverError
from gpuhook.core.inventory.model import Device, DeviceNode
from gpuhook.vendors import sysfs_devices
from gpuhook.vendors.gaudi import names
from gpuhook.vendors.gaudi.vendor import DRIVER, GaudiInventory

VERSION = "/sys/module/habanalabs/version"
OPERATIONAL = "Operational"
_HEX = frozenset("0123456789abcdef")
# The last part of a PCI device's id -> model, for drivers that don't report it.
MODELS = {
    **dict.fromkeys(("1000", "1001", "1010", "1011"), "Gaudi"),
    "1020": "Gaudi2",
    **dict.fromkeys(("1060", "1061", "1062", "1063"), "Gaudi3"),
}


def discover(path: str) -> GaudiInventory:
    """Discover the devices below the driver root; DriverError if there is no driver."""
    return sysfs_devices.discover_below(names.TITLE, path, _discover)


def _discover(root: Rootfs) -> GaudiInventory:
    if not root.exists(DRIVER):
        raise NoDriverError(
            "Intel Gaudi's driver isn't loaded",
            "Run modprobe habanalabs; if that fails, install the package habanalabs-dkms",
        )
    found = [
        _Found(root, name) for name in root.list_folder(DRIVER) if sysfs_devices.is_address(name)
    ]
    found.sort(key=lambda each: (each.number is None, each.number or 0, each.address))
    every = [each.module for each in found]
    nodes = {
        node.path: node for node in sysfs_devices.nodes(root, (p for e in found for p in e.numbers))
    }
    devices = []
    for each in found:
        unique = every.count(each.module) == 1
        devices.append(each.device(each.module if unique else ""))
        devices[-1].state = devices[-1].state or each.strange(nodes)
    version = sysfs_devices.text(root, VERSION)
    facts = (names.NAME, root.path, version, tuple(devices), tuple(nodes.values()))
    networked = tuple(each.address for each in found if each.networked)
    return GaudiInventory(*facts, networked=networked)


class _Found:
    """A device bound to the driver: its properties from files, "" for missing ones.

    ``number`` is the N of accelN, None if it has none; ``numbers`` are its nodes' major:minor in
    those files, by path.
    """

    def __init__(self, root: Rootfs, address: str) -> None:
        place = f"{DRIVER}/{address}"
        self.address = address
        self.module = seat(sysfs_devices.text(root, f"{place}/module_id"))
        sort, product = (
            sysfs_devices.text(root, f"{place}/{name}") for name in ("device_type", "device")
        )
        self.model = model(sort, product)
        self.status = sysfs_devices.text(root, f"{place}/status")
        self.networked = root.exists(f"{place}/net")
        self.number: int | None = None
        self.numbers: dict[str, str] = {}
        for name in root.list_folder(f"{place}/accel"):
            number = sysfs_devices.number(name, "accel")
            control = sysfs_devices.number(name, "accel_controlD")
            if number is not None or control is not None:
                self.number = control if number is None else number
                self.numbers[f"/dev/accel/{name}"] = sysfs_devices.text(
                    root, f"{place}/accel/{name}/dev"
                )
        for name in root.list_folder(f"{place}/infiniband_verbs"):
            if sysfs_devices.number(name, "uverbs") is not None:
                text = sysfs_devices.text(root, f"{place}/infiniband_verbs/{name}/dev")
                self.numbers[f"/dev/infiniband/{name}"] = text

    def device(self, module: str) -> Device:
        """Return it as a device of the inventory; ``module`` is its seat, "" if unsure."""
        called: dict[str, tuple[str, ...]] = {"bus_id": (self.address,)}
        label = self.address
        if self.number is not None:
            label = str(self.number)
            called["index"] = (label,)
        if module:
            called["module"] = (module,)
        paths, facts = tuple(self.numbers), (self.address, self.model)
        return Device(self.address, label, called, paths, *facts, state=self.state())

    def state(self) -> str:
        """Return why it can't be used, from the driver's files only."""
        if self.status != OPERATIONAL:
            return f"its status is {self.status or 'unknown'}"
        wanted = {f"/dev/accel/accel{self.number}", f"/dev/accel/accel_controlD{self.number}"}
        if self.number is None or not wanted <= self.numbers.keys():
            return "the driver hasn't initialized it (it has no accel devices)"
        return ""

    def strange(self, nodes: dict[str, DeviceNode]) -> str:
        """Return which of its nodes is another device, "" for none."""
        for path, numbers in self.numbers.items():
            node = nodes.get(path)
            if node is not None and f"{node.major}:{node.minor}" != numbers:
                return f"{path} is another device (the driver's is {numbers or 'unknown'})"
        return ""


def seat(text: str) -> str:
    """Return the number in the file module_id, "" if it has none."""
    return text if text.isascii() and text.isdecimal() and len(text) < 5 else ""


def model(kind: str, device: str) -> str:
    """Return a product's name from the files device_type and device, "" if both lack it."""
    return kind.capitalize() or MODELS.get(device.removeprefix("0x"), "")

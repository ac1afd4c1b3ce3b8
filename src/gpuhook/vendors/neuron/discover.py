"""Discovery of Neuron devices below a driver root, without opening a device.

/sys/class/neuron_device/neuronN is device N, its node is /dev/neuronN. The same folder has other
files of the driver, such as ultraserver_mode. Source: aws-neuron-driver 2.24, neuron_cdev.c and
neuron_sysfs_metrics.c.
"""

from gpuhook.base.container.rootfs import Rootfs
from gpuhook.base.errors import NoDriverError
from gpuhook.core.inventory.model import Device, DeviceNode
from gpuhook.vendors import sysfs_devices
from gpuhook.vendors.neuron import names
from gpuhook.vendors.neuron.vendor import CLASS, SERIAL, NeuronInventory

VERSION = "/sys/module/neuron/version"
PCI = "/sys/bus/pci/devices"
_SERIAL_DIGITS = 16
# The last part of a PCI device's id -> family and model.
PRODUCTS = {
    **dict.fromkeys(("7064", "7065", "7066", "7067"), ("Inf1", "Inferentia")),
    "7164": ("Trn1", "Trainium1"),
    "7264": ("Inf2", "Inferentia2"),
    "7364": ("Trn2", "Trainium2"),
}


def discover(path: str) -> NeuronInventory:
    """Discover the devices below the driver root; DriverError if there is no driver."""
    return sysfs_devices.discover_below(names.TITLE, path, _discover)


def _discover(root: Rootfs) -> NeuronInventory:
    if not root.exists(CLASS):
        raise NoDriverError(
            "AWS Neuron's driver isn't loaded",
            "Run modprobe neuron; if that fails, install the package aws-neuronx-dkms",
        )
    numbers = device_numbers(root.list_folder(CLASS))
    serials = {number: serial(_text(root, number, SERIAL)) for number in numbers}
    unique = {text for text in serials.values() if [*serials.values()].count(text) == 1}
    nodes = {
        node.path: node for node in sysfs_devices.nodes(root, map("/dev/neuron{}".format, numbers))
    }
    devices = tuple(
        _device(root, number, serials[number] if serials[number] in unique else "", nodes)
        for number in numbers
    )
    cores = tuple(core_count(_text(root, number, "core_count")) for number in numbers)
    version = sysfs_devices.text(root, VERSION)
    facts = (names.NAME, root.path, version, devices, tuple(nodes.values()))
    return NeuronInventory(*facts, cores=cores)


def _device(root: Rootfs, number: int, text: str, nodes: dict[str, DeviceNode]) -> Device:
    """Return a device with the serial number ``text``, "" if it has none of its own."""
    label, path = str(number), f"/dev/neuron{number}"
    called = {"index": (label,), **({"serial": (text,)} if text else {})}
    state = state_of(path, _text(root, number, "dev"), nodes.get(path))
    model = _text(root, number, "info/architecture/device_name") or _model_by_bus(root)
    return Device(text or f"neuron{label}", label, called, (path,), "", model, state=state)


def state_of(path: str, numbers: str, node: DeviceNode | None) -> str:
    """Return why a device can't be used, "" if it can; ``numbers`` is the content of its dev."""
    if not numbers:
        return "the driver hasn't initialized it (it has no device number)"
    if node is not None and f"{node.major}:{node.minor}" != numbers:
        return f"{path} is another device (the driver's is {numbers})"
    return ""


def device_numbers(listed: list[str]) -> list[int]:
    """Return the device numbers among the names in the driver's folder, sorted."""
    found = [name.removeprefix("neuron") for name in listed if name.startswith("neuron")]
    numbers = [int(text) for text in found if text.isascii() and text.isdecimal()]
    return sorted(number for number in numbers if f"neuron{number}" in listed)


def serial(text: str) -> str:
    """Return a device's serial number, "" if the file has none."""
    digits = set(text) - {"0"}
    good = len(text) == _SERIAL_DIGITS and digits and digits <= set("123456789abcdef")
    return text if good else ""


def core_count(text: str) -> int:
    """Return how many cores a device has, 0 if that can't be read."""
    return int(text) if len(text) <= len("64") and text.isascii() and text.isdecimal() else 0


def connected(text: str) -> list[int]:
    """Return the numbers of the devices that a device is connected to, from its file."""
    words = [word.strip() for word in text.split(",")]
    return [int(word) for word in words if word.isascii() and word.isdecimal()]


def product(vendor: str, device: str) -> tuple[str, str] | None:
    """Return family and model from a PCI device's two files, None if it isn't Neuron's."""
    if vendor.strip() != f"0x{names.PCI_VENDOR}":
        return None
    return PRODUCTS.get(device.strip().removeprefix("0x"))


def _model_by_bus(root: Rootfs) -> str:
    """Return the model from the PCI bus; its devices have no number, but all are alike."""
    for address in root.list_folder(PCI):
        ids = (sysfs_devices.text(root, f"{PCI}/{address}/{name}") for name in ("vendor", "device"))
        found = product(*ids)
        if found:
            return found[1]
    return ""


def _text(root: Rootfs, number: int, name: str) -> str:
    return sysfs_devices.text(root, f"{CLASS}/neuron{number}/{name}")

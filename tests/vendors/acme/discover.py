"""Discovery of ACME's NPUs below a driver root, without opening a device.

/sys/class/acme/acme0 is NPU 0, acme0.1 its second part; each is a folder of small files.
"""

from gpuhook.base.container.rootfs import Rootfs
from gpuhook.base.errors import NoDriverError
from gpuhook.core.inventory.model import Device, DeviceNode, Inventory
from gpuhook.vendors import sysfs_devices
from gpuhook.vendors.acme import names
from gpuhook.vendors.acme.vendor import CLASS

CONTROL = "/dev/acmectl"
VERSION = "/sys/module/acme/version"


def discover(path: str) -> Inventory:
    """Discover the NPUs below the driver root; DriverError if there is no driver."""
    return sysfs_devices.discover_below(names.TITLE, path, _discover)


def _discover(root: Rootfs) -> Inventory:
    version = sysfs_devices.text(root, VERSION)
    if not version:
        raise NoDriverError("ACME's driver isn't loaded", "Run modprobe acme")
    labels = [name.removeprefix("acme").split(".") for name in root.list_folder(CLASS)]
    numbers = sorted([*map(int, words)] for words in labels if all(map(str.isdecimal, words)))
    devices = tuple(_device(root, *each) for each in numbers)
    paths = (CONTROL, *(path for device in devices for path in device.nodes))
    found = (DeviceNode.of(path, root.stat(path), _inside(path)) for path in paths)
    nodes = tuple(node for node in found if node is not None)
    return Inventory(names.NAME, root.path, version, devices, nodes, (CONTROL,))


def _device(root: Rootfs, number: int, part: int | None = None) -> Device:
    """Return an NPU, or a part of one."""
    whole = str(number)
    label = whole if part is None else f"{whole}.{part}"

    def fact(name: str, of: str = label) -> str:
        return sysfs_devices.text(root, f"{CLASS}/acme{of}/{name}")

    called = {"board": (fact("board"),), "serial": (fact("serial"),)}
    nodes: tuple[str, ...] = (f"/dev/acme{label}",)
    if part is None:
        called.update(index=(label,), bus_id=(fact("bus_id"),))
        nodes += (f"/dev/acme_dma{label}",)
    else:
        called["part"] = (label,)
    parent = "" if part is None else fact("serial", whole)
    state = "" if fact("state") == "ready" else f"it is {fact('state')}"
    node = DeviceNode.of(nodes[0], root.stat(nodes[0]))
    state = state or sysfs_devices.wrong_numbers(node, fact("dev"))
    facts = fact("bus_id"), fact("model")
    return Device(fact("serial"), label, called, nodes, *facts, parent, state)


def _inside(path: str) -> str:
    """Return where ACME's library looks for a node, "" for the same place as on the host."""
    return path.replace("/acme_dma", "/acme/dma") if "_dma" in path else ""

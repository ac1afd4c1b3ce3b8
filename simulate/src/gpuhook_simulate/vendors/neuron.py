"""A driver root with simulated Neuron devices: the kernel's files, and nodes.

Settings: ``family`` (Inf1, Inf2, Trn1, Trn2); ``gap``, ``no-serial``, ``no-node`` and ``half-made``
are numbers (0,2) of devices that are gone, have no serial number, no node, or only a folder;
``stray`` are numbers of nodes without a device; ``cores`` is the number of each device's cores.
"""

from gpuhook.base.errors import SimulateError, shown
from gpuhook.vendors.neuron.discover import PCI, PRODUCTS, VERSION
from gpuhook.vendors.neuron.names import PCI_VENDOR
from gpuhook.vendors.neuron.vendor import CLASS
from gpuhook_simulate.majors import devices_text, free_majors, machines_devices
from gpuhook_simulate.settings import checked
from gpuhook_simulate.tree import Tree

SETTINGS = {"family": "Trn1", "gap": "", "no-serial": "", "no-node": "", "half-made": "",
            "stray": "", "cores": ""}  # fmt: skip
_DEVICES = "sys/devices/virtual/neuron_device"
# Family -> cores of a device, and the driver's names of the device and its cores.
_FAMILIES = {"Inf1": ("4", "NDv1", "NCv1"), "Inf2": ("2", "NDv3", "NCv2"),
             "Trn1": ("2", "NDv2", "NCv2"), "Trn2": ("8", "NDv4", "NCv3")}  # fmt: skip


def simulate(tree: Tree, count: int, settings: dict[str, str]) -> list[str]:
    """Fill the tree; return lines about the devices."""
    settings = checked(settings, SETTINGS, "The simulator of AWS Neuron")
    family = settings["family"]
    if family not in _FAMILIES:
        known = ", ".join(_FAMILIES)
        raise SimulateError(f"There is no family {shown(family)}", f"Use one of {known}")
    settings["cores"] = settings["cores"] or _FAMILIES[family][0]
    every = machines_devices()
    majors = free_majors(("neuron",), every)
    tree.text("proc/devices", devices_text(majors, every), 0o444)
    tree.text(VERSION, "2.24.7.0\n", 0o444)
    for decoy in ("ultraserver_mode", "node_id_2"):
        tree.text(f"{CLASS}/{decoy}", "-1\n", 0o444)
    _bus(tree, count, family)
    numbers = [number for number in range(count) if str(number) not in _some(settings, "gap")]
    lines = []
    for number in numbers:
        _device(tree, number, numbers, majors["neuron"], settings)
        lines.append(f"Neuron device {number}: {_serial(number)}, {settings['cores']} cores")
    for text in _some(settings, "stray"):
        tree.node(f"dev/neuron{text}", majors["neuron"], int(text))
    return lines


def _some(settings: dict[str, str], name: str) -> list[str]:
    return [text for text in settings[name].split(",") if text]


def _serial(number: int) -> str:
    return f"{0xA1B2C3D4E50000 + number:016x}"


def _bus(tree: Tree, count: int, family: str) -> None:
    """Create the PCI devices, whose order is unrelated to numbers, and an Amazon network card."""
    product = next(each for each, (name, _) in PRODUCTS.items() if name == family)
    drivers = {f"0000:{bus + 0x10:02x}:00.0": (product, "neuron") for bus in range(count)}
    drivers["0000:00:05.0"] = ("ec20", "ena")
    for address, (device, driver) in drivers.items():
        place = f"sys/devices/pci0000:00/{address}"
        tree.text(f"{place}/vendor", f"0x{PCI_VENDOR}\n", 0o444)
        tree.text(f"{place}/device", f"0x{device}\n", 0o444)
        tree.link(f"{place}/driver", f"../../../bus/pci/drivers/{driver}")
        tree.link(f"{PCI}/{address}", f"../../../devices/pci0000:00/{address}")
        tree.link(f"sys/bus/pci/drivers/{driver}/{address}", f"../../../../{place[4:]}")


def _device(
    tree: Tree, number: int, numbers: list[int], major: int, settings: dict[str, str]
) -> None:
    name, text, family = f"neuron{number}", str(number), settings["family"]
    place = f"{_DEVICES}/{name}"
    tree.link(f"{CLASS}/{name}", f"../../devices/virtual/neuron_device/{name}")
    if text not in _some(settings, "no-node"):
        tree.node(f"dev/{name}", major, number)
    if text in _some(settings, "half-made"):
        tree.folder(place)
        return
    _, kind, core = _FAMILIES[family]
    model = next(model for each, model in PRODUCTS.values() if each == family)
    others = [each for each in (number - 1, number + 1) if each in numbers]
    serial = "" if text in _some(settings, "no-serial") else _serial(number)
    facts = {"arch_type": kind, "device_name": model, "instance_type": family}
    tree.text(f"{place}/dev", f"{major}:{number}\n", 0o444)
    tree.text(f"{place}/core_count", settings["cores"], 0o400)
    tree.text(f"{place}/connected_devices", f"{', '.join(map(str, others))}\n", 0o400)
    tree.text(f"{place}/info/serial_number", f"{serial}\n", 0o444)
    for file, fact in facts.items():
        tree.text(f"{place}/info/architecture/{file}", f"{fact}\n", 0o444)
    for index in range(int(settings["cores"])):
        tree.text(f"{place}/neuron_core{index}/info/architecture/arch_type", f"{core}\n", 0o444)

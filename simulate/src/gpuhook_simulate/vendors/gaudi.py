"""A driver root with simulated Gaudis: the kernel's files, and nodes.

Settings: ``type`` (GAUDI, GAUDI2, GAUDI3); ``addresses`` and ``modules`` are the PCI addresses and
module ids of all devices, in order; lists of numbers (0,2) are ``gap`` (devices that are gone),
``reset`` (in reset), ``no-module``, ``no-node``, ``no-accel`` (incomplete), ``net`` (with network
ports) and ``uverbs`` (with RDMA; by default all).
"""

from gpuhook.base.errors import SimulateError, shown
from gpuhook.vendors.gaudi.discover import MODELS, VERSION
from gpuhook.vendors.gaudi.names import PCI_VENDOR
from gpuhook.vendors.gaudi.vendor import DRIVER
from gpuhook_simulate.majors import devices_text, free_majors, machines_devices
from gpuhook_simulate.settings import checked
from gpuhook_simulate.tree import Tree

SETTINGS = {"type": "GAUDI2", "addresses": "", "modules": "", "gap": "", "reset": "",
            "no-module": "", "no-node": "", "no-accel": "", "net": "", "uverbs": "all"}  # fmt: skip
_PCI = "sys/devices/pci0000:00"
_CONTROL = 128  # the minor of the first control node


def simulate(tree: Tree, count: int, settings: dict[str, str]) -> list[str]:
    """Fill the tree; return lines about the devices."""
    settings = checked(settings, SETTINGS, "The simulator of Intel Gaudi")
    known = {name.upper() for name in MODELS.values()}
    if settings["type"] not in known:
        kinds = ", ".join(sorted(known))
        raise SimulateError(f"There is no type {shown(settings['type'])}", f"Use one of {kinds}")
    every = machines_devices()
    majors = free_majors(("accel", "infiniband_verbs"), every)
    tree.text("proc/devices", devices_text(majors, every), 0o444)
    tree.text(VERSION, "1.24.0\n", 0o444)
    tree.folder(DRIVER)
    addresses = _some(settings, "addresses") or [f"0000:{0x19 + n:02x}:00.0" for n in range(count)]
    seats = _some(settings, "modules") or [str(number ^ 3) for number in range(count)]
    lines = []
    for number in range(count):
        if str(number) in _some(settings, "gap"):
            continue
        place = _function(tree, addresses[number], "habanalabs")
        _device(tree, place, number, majors, {**settings, "seat": seats[number]})
        lines.append(f"Gaudi {number}: {addresses[number]}, module {seats[number]}")
    _decoy(tree, count, majors["accel"])
    return lines


def _some(settings: dict[str, str], name: str) -> list[str]:
    return [text for text in settings[name].split(",") if text]


def _function(tree: Tree, address: str, driver: str) -> str:
    """Create the folder of a PCI device that is bound to a driver; return its path."""
    place = f"{_PCI}/{address}"
    tree.link(f"{place}/driver", f"../../../bus/pci/drivers/{driver}")
    tree.link(f"sys/bus/pci/drivers/{driver}/{address}", f"../../../../{place[4:]}")
    tree.link(f"sys/bus/pci/devices/{address}", f"../../../{place[4:]}")
    return place


def _device(
    tree: Tree, place: str, number: int, majors: dict[str, int], settings: dict[str, str]
) -> None:
    text, kind = str(number), settings["type"]
    product = next(each for each, name in MODELS.items() if name.upper() == kind)
    facts = {
        "vendor": f"0x{PCI_VENDOR}",
        "device": f"0x{product}",
        "pci_addr": place.rpartition("/")[2],
        "device_type": kind,
        "status": "In reset" if text in _some(settings, "reset") else "Operational",
    }
    if text not in _some(settings, "no-module"):
        facts["module_id"] = settings["seat"]
    for name, fact in facts.items():
        tree.text(f"{place}/{name}", f"{fact}\n", 0o444)
    made = []
    if text not in _some(settings, "no-accel"):
        made = [("accel", f"accel{number}", number)]
        made += [("accel", f"accel_controlD{number}", _CONTROL + number)]
    if settings["uverbs"] == "all" or text in _some(settings, "uverbs"):
        made += [("infiniband_verbs", f"uverbs{number}", 192 + number)]
    for folder, name, minor in made:
        tree.text(f"{place}/{folder}/{name}/dev", f"{majors[folder]}:{minor}\n", 0o444)
        if text not in _some(settings, "no-node"):
            tree.node(f"dev/{folder.partition('_')[0]}/{name}", majors[folder], minor)
    if text in _some(settings, "net"):
        tree.text(f"{place}/net/ens{number}d8/address", f"b0:fd:0b:d6:15:{number:02x}\n", 0o444)
        tree.text(f"{place}/net/ens{number}d8/dev_port", "8\n", 0o444)


def _decoy(tree: Tree, number: int, major: int) -> None:
    """Create a device of another driver, with a node in the same folder."""
    place = _function(tree, "0000:00:0b.0", "intel_vpu")
    tree.text(f"{place}/vendor", "0x8086\n", 0o444)
    tree.text(f"{place}/device", "0x7d1d\n", 0o444)
    tree.text(f"{place}/accel/accel{number}/dev", f"{major}:{number}\n", 0o444)
    tree.node(f"dev/accel/accel{number}", major, number)

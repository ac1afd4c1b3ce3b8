"""A driver root with simulated Intel NPUs: only the files that discover reads.

Settings: ``first`` the number of the first node, ``no-node`` NPUs of the driver without a node
(0,2), ``group`` of the nodes, ``decoy=yes`` for another vendor's /dev/accel/accel0.
"""

from gpuhook.vendors.intel_npu.discover import DRIVER
from gpuhook_simulate.majors import devices_text, free_majors, machines_devices
from gpuhook_simulate.settings import checked
from gpuhook_simulate.tree import Tree

SETTINGS = {"first": "0", "no-node": "", "group": "106", "decoy": "no"}


def simulate(tree: Tree, count: int, settings: dict[str, str]) -> list[str]:
    """Fill the tree; return lines about the devices."""
    settings = checked(settings, SETTINGS, "Intel's simulator")
    tree.text(f"sys/bus/pci/drivers/{DRIVER}/bind", "", 0o200)
    known = machines_devices()
    majors = free_majors(("accel",), known)
    tree.text("proc/devices", devices_text(majors, known), 0o444)
    major, first = majors["accel"], int(settings["first"])
    lines = []
    for number in range(first, first + count):
        address = _add(tree, number, DRIVER, major)
        if str(number) not in settings["no-node"].split(","):
            gid = int(settings["group"])
            tree.node(f"dev/accel/accel{number}", major, number, 0o660, gid)
        lines.append(f"NPU {number} at {address}")
    if settings["decoy"] == "yes" and first:
        _add(tree, 0, "qaic", major)
        tree.node("dev/accel/accel0", major, 0)
    return lines


def _add(tree: Tree, number: int, driver: str, major: int) -> str:
    address = f"0000:{number:02x}:0b.0"
    folder = f"sys/devices/pci0000:00/{address}"
    for name, text in (("vendor", "0x8086"), ("device", "0x7d1d"), ("class", "0x120000")):
        tree.text(f"{folder}/{name}", f"{text}\n", 0o444)
    tree.link(f"{folder}/driver", f"../../../bus/pci/drivers/{driver}")
    tree.text(f"{folder}/accel/accel{number}/dev", f"{major}:{number}\n", 0o444)
    link = f"sys/bus/pci/drivers/{driver}/{address}"
    tree.link(link, f"../../../../devices/pci0000:00/{address}")
    tree.link(f"sys/bus/pci/devices/{address}", f"../../../devices/pci0000:00/{address}")
    return address

"""A driver root with ACME's fictional NPUs, which has only the files that discover reads.

Settings: ``boards`` is the number of boards that the NPUs are spread over. ``split`` and
``reset`` list the NPUs (0,2) that are split in two or are being reset. ``group`` is the group
that owns the nodes.
"""

from gpuhook.vendors.acme.discover import CONTROL, VERSION
from gpuhook.vendors.acme.vendor import CLASS
from gpuhook_simulate.majors import devices_text, free_majors, machines_devices
from gpuhook_simulate.settings import checked
from gpuhook_simulate.tree import Tree

SETTINGS = {"boards": "1", "split": "", "reset": "", "group": "1234"}


def simulate(tree: Tree, count: int, settings: dict[str, str]) -> list[str]:
    """Fill the tree; return lines that describe the result."""
    settings = checked(settings, SETTINGS, "ACME's simulator")
    split, reset = (settings[name].split(",") for name in ("split", "reset"))
    known = machines_devices()
    majors = free_majors(("acme", "acme_dma", "acme_part"), known)
    tree.text("proc/devices", devices_text(majors, known), 0o444)
    tree.text(VERSION, "7.1\n", 0o444)
    tree.node(CONTROL, majors["acme"], 255)
    gid = int(settings["group"])
    lines = []
    for number in range(count):
        label = str(number)
        facts = {
            "board": f"B{number % int(settings['boards'])}",
            "bus_id": f"0000:{number + 0x41:02x}:00.0",
            "model": "ACME NPU 100",
            "serial": f"A-{number:04d}",
            "state": "in reset" if label in reset else "ready",
            "dev": f"{majors['acme']}:{number}",
        }
        _write(tree, label, facts)
        tree.node(f"dev/acme{label}", majors["acme"], number, 0o660, gid)
        tree.node(f"dev/acme_dma{label}", majors["acme_dma"], number, 0o660, gid)
        lines.append(f"NPU {label}: {facts['serial']} on board {facts['board']}")
        for part in range(2) if label in split else ():
            major, minor = majors["acme_part"], 2 * number + part
            own = {"serial": f"{facts['serial']}/{part}", "dev": f"{major}:{minor}"}
            _write(tree, f"{label}.{part}", {**facts, **own})
            tree.node(f"dev/acme{label}.{part}", major, minor, 0o660, gid)
            lines.append(f"  part {label}.{part}")
    return lines


def _write(tree: Tree, label: str, facts: dict[str, str]) -> None:
    for name, text in facts.items():
        tree.text(f"{CLASS}/acme{label}/{name}", f"{text}\n", 0o444)

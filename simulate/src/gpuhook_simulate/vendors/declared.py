"""A driver root with simulated devices of a declared vendor: the files that discover reads.

Settings: ``numbers`` of the devices (0,2,5), ``group`` and ``mode`` of the nodes.
"""

from types import ModuleType

from gpuhook.base.config.declared import DRIVER, PCI, DeclaredTable
from gpuhook.vendors.declared.names import GROUPS, VFIO
from gpuhook_simulate.majors import devices_text, free_majors, machines_devices
from gpuhook_simulate.settings import checked
from gpuhook_simulate.tree import Tree

SETTINGS = {"numbers": "", "group": "0", "mode": "666"}


class DeclaredSimulator:
    """The simulator of one declared vendor."""

    def __init__(self, names: ModuleType) -> None:
        self._names = names
        self._table: DeclaredTable = names.TABLE

    def simulate(self, tree: Tree, count: int, settings: dict[str, str]) -> list[str]:
        """Fill the tree; return lines about the devices."""
        chosen = checked(settings, SETTINGS, "The simulator of declared vendors")
        words = [word for word in chosen["numbers"].split(",") if word]
        numbers = [int(word) for word in words] or list(range(count))
        known = machines_devices()
        [major] = free_majors((self._names.NAME,), known).values()
        tree.text("proc/devices", devices_text({self._names.NAME: major}, known), 0o444)
        table = self._table
        own = [path for path in table.optional_nodes if "{n}" in path]
        paths = [*table.control, *(path for path in table.optional_nodes if path not in own)]
        for number in numbers:
            each = [path.replace("{n}", str(number)) for path in (*table.nodes, *own)]
            paths += [path.replace("*", "0") for path in each]
        facts = int(chosen["mode"], 8), int(chosen["group"])
        for minor, path in enumerate(paths):
            tree.node(path, major, minor, *facts)
        self._prove(tree, numbers)
        for path in table.files:
            tree.text(path, f"{path}\n", 0o755)
        for path in table.folders:
            tree.text(f"{path}/content", f"{path}\n")
        for path in table.writable_folders:
            tree.folder(path)
        return [f"{table.noun} {number}" for number in numbers]

    def _prove(self, tree: Tree, numbers: list[int]) -> None:
        """Write the files that show that the driver is present, and whose its nodes are."""
        proof = self._table.present
        if proof.startswith(PCI):
            vendor = f"0x{proof.removeprefix(PCI)}\n"
            folders = ["sys/bus/pci/devices/0000:01:00.0"]
            if self._table.nodes[0].startswith(VFIO):
                groups = GROUPS.lstrip("/")
                folders += [f"{groups}/{number}/devices/0000:01:00.0" for number in numbers]
            for folder in folders:
                tree.text(f"{folder}/vendor", vendor, 0o444)
        elif proof.startswith(DRIVER):
            tree.folder(f"sys/module/{proof.removeprefix(DRIVER)}")
        elif proof and not proof.startswith("/dev/"):
            tree.text(proof, "1\n", 0o444)


def of(names: ModuleType) -> DeclaredSimulator:
    """Return the simulator of the vendor with these names."""
    return DeclaredSimulator(names)

"""Machines of vendors' simulated devices, for tests that may make no node: those are on paper."""

from pathlib import Path
from typing import Any

from gpuhook.inventory.model import Inventory, Node
from gpuhook.simulate.tree import Tree
from gpuhook.vendors import seam
from gpuhook.vendors.parts import part


class Paper(Tree):
    """A tree for those who may not make nodes: it notes them."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.nodes: dict[str, Node] = {}

    def node(self, relative: str, major: int, minor: int, mode: int = 0o666, gid: int = 0) -> None:
        path = f"/{relative.lstrip('/')}"
        self.nodes[path] = Node(path, major, minor, mode, 0, gid)


def machine(vendor: str, root: Path, count: int = 4, **settings: object) -> Inventory:
    """Simulate a machine in that folder and return what it has.

    ``settings`` are the simulator's, with _ for each - of their names.
    """
    tree = Paper(str(root))
    words = {name.replace("_", "-"): str(value) for name, value in settings.items()}
    _part(vendor, "simulate").simulate(tree, count, words)
    found = look(vendor, root)
    found.nodes = tuple(tree.nodes[path] for path in found.missing() if path in tree.nodes)
    return found


def look(vendor: str, root: Path) -> Inventory:
    """Return what a vendor's discover finds below a driver root."""
    found: Inventory = _part(vendor, "discover").discover(str(root))
    return found


def _part(vendor: str, what: str) -> Any:
    module = part(seam.KNOWN[vendor], what)
    assert module is not None
    return module


def spec_with(*env: str, **more: Any) -> dict[str, Any]:
    """Return an OCI spec whose process has these variables."""
    return {
        "ociVersion": "1.0.2",
        "process": {"user": {"uid": 1000, "gid": 1000}, "env": list(env)},
        "root": {"path": "rootfs"},
        "linux": {"namespaces": [{"type": "mount"}]},
        **more,
    }

"""Simulated machines for tests of users who may not make device nodes: nodes are only recorded."""

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from gpuhook.core.contract import package
from gpuhook.core.inventory.model import DeviceNode, Inventory
from gpuhook.vendors import registry
from gpuhook_simulate.tree import Tree
from gpuhook_simulate.vendors import Simulator
from gpuhook_simulate.vendors import simulator as simulator_of


class NodesOnPaper(Tree):
    """A tree that records nodes, and their places in a container, instead of making them."""

    def __init__(self, root: str, inside: Callable[[str], str] = lambda _: "") -> None:
        super().__init__(root)
        self.nodes: dict[str, DeviceNode] = {}
        self._inside = inside

    def node(self, relative: str, major: int, minor: int, mode: int = 0o666, gid: int = 0) -> None:
        path = f"/{relative.lstrip('/')}"
        self.nodes[path] = DeviceNode(path, major, minor, mode, 0, gid, self._inside(path))


def simulated(
    simulator: Simulator,
    discoverer: ModuleType,
    root: Path,
    count: int,
    settings: dict[str, str],
    inside: Callable[[str], str] = lambda _: "",
) -> Inventory:
    """Simulate a vendor's machine in that folder and return its inventory, with recorded nodes.

    ``simulator`` and ``discoverer`` are modules of the vendor.
    """
    tree = NodesOnPaper(str(root), inside)
    list(simulator.simulate(tree, count, settings))
    seen: Inventory = discoverer.discover(str(root))
    return with_nodes(seen, tree)


def machine(vendor: str, root: Path, count: int = 4, **settings: object) -> Inventory:
    """Simulate a known vendor's machine as ``simulated`` does.

    ``settings`` are the simulator's, with _ in place of each - in their names.
    """
    simulator = simulator_of(registry.BUILT_IN[vendor])
    discoverer = importlib.import_module(f"{package(registry.BUILT_IN[vendor])}.discover")
    assert simulator is not None
    words = {name.replace("_", "-"): str(value) for name, value in settings.items()}
    return simulated(simulator, discoverer, root, count, words)


def with_nodes(seen: Inventory, tree: NodesOnPaper) -> Inventory:
    """Return an inventory with its missing nodes added, if the tree has recorded them."""
    found = (tree.nodes[path] for path in seen.missing() if path in tree.nodes)
    seen.nodes = (*seen.nodes, *found)
    return seen


def spec_with(*env: str, **more: Any) -> dict[str, Any]:
    """Return an OCI spec whose process has these variables."""
    return {
        "ociVersion": "1.0.2",
        "process": {"user": {"uid": 1000, "gid": 1000}, "env": list(env)},
        "root": {"path": "rootfs"},
        "linux": {"namespaces": [{"type": "mount"}]},
        **more,
    }

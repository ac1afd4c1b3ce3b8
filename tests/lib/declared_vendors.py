"""Tables of docs/vendors/declared.md, and machines with the devices that they declare."""

import re
from pathlib import Path

from gpuhook.base.config.model import Config
from gpuhook.core import contract
from gpuhook.core.inventory.model import DeviceNode, Inventory
from gpuhook.vendors import registry
from gpuhook_simulate.tree import Tree
from gpuhook_simulate.vendors import simulator

PAGE = Path(__file__).parents[2] / "docs/vendors/declared.md"
FENCED = re.compile(r"^```toml\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def tables() -> dict[str, str]:
    """Return the tables of the page, by the vendor's name."""
    blocks = FENCED.findall(PAGE.read_text())
    return {re.findall(r'^name = "(.*?)"', block, re.MULTILINE)[0]: block for block in blocks}


class NodesOnPaper(Tree):
    """A tree for users who may not make nodes: it records them and makes files in their place."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.nodes: dict[str, DeviceNode] = {}

    def node(self, relative: str, major: int, minor: int, mode: int = 0o666, gid: int = 0) -> None:
        path = f"/{relative.lstrip('/')}"
        self.text(path, "")
        self.nodes[path] = DeviceNode(path, major, minor, mode, 0, gid)


def simulated(root: Path, config: Config, name: str, count: int, **settings: str) -> NodesOnPaper:
    """Return a simulated machine with a declared vendor's devices; its nodes are recorded."""
    tree = NodesOnPaper(str(root))
    simulates = simulator(registry.all_vendors(config)[name])
    assert simulates is not None
    simulates.simulate(tree, count, settings)
    return tree


def looked_at(root: Path, config: Config, name: str) -> Inventory:
    """Return the inventory of a declared vendor below a driver root."""
    config.root = str(root)
    found: Inventory = contract.load(registry.all_vendors(config)[name]).discover(config)
    return found

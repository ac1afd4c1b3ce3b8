"""Machines of vendors whose discovery looks for nodes, for tests that may make none.

Each node is an empty file, and is recorded as a node.
"""

from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

from paper import NodesOnPaper

from gpuhook.core.contract import package
from gpuhook.core.inventory.model import DeviceNode
from gpuhook.vendors import registry
from gpuhook_simulate.vendors import simulator


class Machine(NodesOnPaper):
    """A simulated driver root; ``nodes`` may be changed before ``look`` is called."""

    def __init__(self, vendor: str, root: Path, count: int = 4, **settings: object) -> None:
        super().__init__(str(root))
        self.vendor = vendor
        self.place = root
        words = {name.replace("_", "-"): str(value) for name, value in settings.items()}
        simulates = simulator(registry.BUILT_IN[vendor])
        assert simulates is not None
        self.lines = list(simulates.simulate(self, count, words))

    def node(self, relative: str, major: int, minor: int, mode: int = 0o666, gid: int = 0) -> None:
        super().node(relative, major, minor, mode, gid)
        self.text(relative, "")

    def write(self, path: str, text: str) -> Path:
        """Write a file, and replace an existing one."""
        self.text(path, text)
        return self.place / path.lstrip("/")

    def look(self) -> Any:
        """Return the result of the vendor's discovery."""
        discover = import_module(f"{package(registry.BUILT_IN[self.vendor])}.discover")
        nodes = self.nodes

        def known(path: str, status: object, inside: str = "") -> DeviceNode | None:
            node = nodes.get(path) if status is not None else None
            if node is None:
                return None
            return DeviceNode(path, *node.numbers, node.mode, node.uid, node.gid, inside)

        with mock.patch.object(DeviceNode, "of", known):
            return discover.discover(str(self.place))


def machine(vendor: str, root: Path, count: int = 4, **settings: object) -> Any:
    """Return the inventory of a simulated machine.

    ``settings`` are the simulator's, with _ in place of each - in their names.
    """
    return Machine(vendor, root, count, **settings).look()

"""Machines of vendors that look which nodes there are, for tests that may make none.

Each node is an empty file, and on paper a node.
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
    """A simulated driver root; ``nodes`` may be changed before it is looked at."""

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
        """Write a file, in place of the one that is there."""
        self.text(path, text)
        return self.place / path.lstrip("/")

    def look(self) -> Any:
        """Return what discover finds."""
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
    """Return what a simulated machine has; ``settings`` are the simulator's, _ for each -."""
    return Machine(vendor, root, count, **settings).look()

"""The vendor of tests/vendors, in a gpuhook that knows it, and machines with its devices."""

import importlib
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import gpuhook.vendors
from gpuhook.config import Config
from gpuhook.inventory.model import Inventory, Node
from gpuhook.request.reader import Request, SpecReader
from gpuhook.simulate.tree import Tree
from gpuhook.vendors import seam

FOLDER = Path(__file__).parents[1] / "vendors"
PACKAGE = "gpuhook.vendors.acme"
GROUP = 1234


def know(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have gpuhook know ACME for the time of a test, as if its folder lay in the package."""
    folders = [*gpuhook.vendors.__path__, str(FOLDER)]
    monkeypatch.setattr(gpuhook.vendors, "__path__", folders)
    monkeypatch.setitem(seam.KNOWN, "acme", part("names"))


def part(name: str) -> ModuleType:
    """Return a module of ACME's."""
    return importlib.import_module(f"{PACKAGE}.{name}")


class _NodesOnPaper(Tree):
    """A tree for those who may not make nodes: it notes them."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.nodes: dict[str, Node] = {}

    def node(self, relative: str, major: int, minor: int, mode: int = 0o666, gid: int = 0) -> None:
        path = f"/{relative.lstrip('/')}"
        inside = part("discover")._inside(path)
        self.nodes[path] = Node(path, major, minor, mode, 0, gid, inside)


def machine(root: Path, count: int = 4, **settings: str) -> Inventory:
    """Simulate a machine in that folder and return what it has; its nodes are on paper."""
    tree = _NodesOnPaper(str(root))
    part("simulate").simulate(tree, count, settings)
    seen: Inventory = part("discover").discover(str(root))
    nodes = tuple(tree.nodes[path] for path in seen.missing())
    facts = (seen.vendor, seen.root, seen.version, seen.devices)
    return Inventory(*facts, nodes, seen.control)


def spec_with(*env: str, **more: Any) -> dict[str, Any]:
    """Return an OCI spec whose process has these variables."""
    return {
        "ociVersion": "1.0.2",
        "process": {"user": {"uid": 1000, "gid": 1000}, "env": list(env)},
        "root": {"path": "rootfs"},
        "linux": {"namespaces": [{"type": "mount"}]},
        **more,
    }


def read(spec: Mapping[str, Any], config: Config | None = None) -> Request:
    """Return what a container asks for of ACME."""
    names, vendor = part("names"), part("vendor").VENDOR
    return SpecReader(dict(spec), config or Config()).read(names, vendor)

"""What the doctor says of Intel Gaudi's driver, and what its simulator refuses."""

from collections.abc import Mapping
from pathlib import Path

import paper
import pytest
from fabricated import Tree
from paper import NodesOnPaper

from gpuhook.ground.config.model import Config
from gpuhook.ground.errors import SimulateError
from gpuhook.start.inventory.model import Node
from gpuhook.tools.vendors.gaudi import doctor
from gpuhook.vendors.gaudi import discover
from gpuhook.vendors.gaudi.model import Inventory
from gpuhook_simulate.vendors.gaudi import simulate


class Examine:
    """The doctor on a simulated machine whose nodes are on paper."""

    def __init__(self, tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tree = tree
        self._monkeypatch = monkeypatch
        self.mode = 0o666

    def machine(
        self, count: int = 4, settings: Mapping[str, str] | None = None
    ) -> list[tuple[str, str]]:
        """Return status and message of each finding."""
        made = NodesOnPaper(str(self.tree.root))
        simulate(made, count, dict(settings or {}))

        def discovered(path: str) -> Inventory:
            found = discover.discover(path)
            there = (made.nodes[name] for name in found.missing() if name in made.nodes)
            found.nodes = tuple(Node(n.path, n.major, n.minor, self.mode) for n in there)
            return found

        self._monkeypatch.setattr(doctor, "discover", discovered)
        return self()

    def __call__(self) -> list[tuple[str, str]]:
        findings = [*doctor.gaudi_devices(self.tree.case)]
        assert all(each.check == "gaudi-devices" for each in findings)
        return [(str(each.status), each.message) for each in findings]


@pytest.fixture
def examine(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> Examine:
    return Examine(tree, monkeypatch)


def test_a_machine_in_order(examine: Examine) -> None:
    assert examine.machine() == [("ok", "Intel Gaudi's driver 1.24.0 has 4 devices")]


def test_a_machine_without_any_is_no_finding(examine: Examine) -> None:
    examine.tree.write("/sys/bus/pci/devices/0000:00:05.0/vendor", "0x8086\n")
    examine.tree.write("/sys/bus/pci/devices/0000:00:05.0/device", "0x1020\n")
    assert examine() == []


def test_devices_without_a_driver(examine: Examine) -> None:
    examine.tree.write("/sys/bus/pci/devices/0000:10:00.0/vendor", "0x1da3\n")
    examine.tree.write("/sys/bus/pci/devices/0000:10:00.0/device", "0x1020\n")
    assert examine() == [("failure", "Intel Gaudi's driver isn't loaded")]


def test_a_driver_without_devices(examine: Examine) -> None:
    assert examine.machine(0) == [("warning", "Intel Gaudi's driver has no device")]


@pytest.mark.parametrize(
    ("settings", "status", "message"),
    [
        ({"reset": "1"}, "warning", "Gaudi 1 (0000:1a:00.0) can't be used: its status is In reset"),
        ({"no-node": "1"}, "failure", "Intel Gaudi's driver has no node /dev/accel/accel1, "),
        ({"no-module": "0,2"}, "warning", "The module id of Gaudi 0, 2 isn't known"),
        ({"net": "0,1"}, "note", "The network ports of Gaudi 0, 1 are moved into no container"),
    ],
)
def test_what_is_said(
    examine: Examine, settings: dict[str, str], status: str, message: str
) -> None:
    _, finding = examine.machine(4, settings)
    assert finding[0] == status
    assert finding[1].startswith(message)


def test_nodes_for_root_alone(examine: Examine) -> None:
    examine.mode = 0o600
    _, (status, message) = examine.machine(1)
    assert status == "warning"
    assert message.startswith("Not everybody may open /dev/accel/accel0")


def test_the_driver_root_is_looked_at(examine: Examine) -> None:
    config = Config()
    config.driver_roots = ("gaudi=/driver",)
    examine.tree.config = config
    simulate(NodesOnPaper(str(examine.tree.root / "driver")), 2, {})
    assert examine()[0] == ("ok", "Intel Gaudi's driver 1.24.0 has 2 devices")


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"colour": "red"}, "has no setting 'colour'"), ({"type": "GAUDI9"}, "no type 'GAUDI9'")],
)
def test_what_the_simulator_refuses(tmp_path: Path, settings: dict[str, str], message: str) -> None:
    with pytest.raises(SimulateError, match=message):
        paper.machine("gaudi", tmp_path, 1, **settings)

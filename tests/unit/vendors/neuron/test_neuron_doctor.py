"""What the doctor says of AWS Neuron's driver."""

from collections.abc import Mapping

import pytest
from fabricated import Tree
from paper import NodesOnPaper

from gpuhook.ground.config.model import Config
from gpuhook.start.inventory.model import Node
from gpuhook.tools.doctor.finding import Finding
from gpuhook.tools.vendors.neuron import doctor
from gpuhook.vendors.neuron import discover
from gpuhook.vendors.neuron.model import CLASS, Inventory
from gpuhook_simulate.vendors.neuron import simulate


@pytest.fixture
def examine(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> "Examine":
    return Examine(tree, monkeypatch)


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
        paper = NodesOnPaper(str(self.tree.root))
        simulate(paper, count, dict(settings or {}))

        def discovered(path: str) -> Inventory:
            found = discover.discover(path)
            for name in found.missing():
                if node := paper.nodes.get(name):
                    made = Node(name, node.major, node.minor, self.mode)
                    found.nodes = (*found.nodes, made)
            return found

        self._monkeypatch.setattr(doctor, "discover", discovered)
        return self()

    def __call__(self) -> list[tuple[str, str]]:
        findings: list[Finding] = [*doctor.neuron_devices(self.tree.case)]
        assert all(each.check == "neuron-devices" for each in findings)
        return [(str(each.status), each.message) for each in findings]


def test_a_machine_in_order(examine: Examine) -> None:
    assert examine.machine() == [("ok", "AWS Neuron's driver 2.24.7.0 has 4 devices")]


def test_a_machine_without_any_is_no_finding(examine: Examine) -> None:
    assert examine() == []
    examine.tree.write("/sys/bus/pci/devices/0000:00:05.0/vendor", "0x1d0f\n")
    examine.tree.write("/sys/bus/pci/devices/0000:00:05.0/device", "0xec20\n")
    assert examine() == []


def test_devices_without_a_driver(examine: Examine) -> None:
    examine.tree.write("/sys/bus/pci/devices/0000:10:00.0/vendor", "0x1d0f\n")
    examine.tree.write("/sys/bus/pci/devices/0000:10:00.0/device", "0x7164\n")
    assert examine() == [("failure", "AWS Neuron's driver isn't loaded")]


def test_a_driver_without_devices(examine: Examine) -> None:
    assert examine.machine(0) == [("warning", "AWS Neuron's driver has no device")]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"half-made": "1"}, ("warning", "Neuron device 1 (neuron1) can't be used: ")),
        (
            {"no-node": "1,2"},
            ("failure", "AWS Neuron's driver has no node /dev/neuron1, /dev/neuron2"),
        ),
        ({"gap": "1,2"}, ("warning", "There is no Neuron device 1-2: no container gets")),
    ],
)
def test_what_is_wrong(
    examine: Examine, settings: dict[str, str], expected: tuple[str, str]
) -> None:
    _, (status, message) = examine.machine(4, settings)
    assert status == expected[0]
    assert message.startswith(expected[1])


def test_a_device_that_is_connected_and_not_there(examine: Examine) -> None:
    """The last one is in no gap: its neighbour's connections name it."""
    examine.machine(3)
    examine.tree.write(f"{CLASS}/neuron2/connected_devices", "1, 3\n")
    assert examine()[1][1].startswith("There is no Neuron device 3")


def test_a_node_without_a_device(examine: Examine) -> None:
    examine.tree.write("/dev/neuron40")
    examine.tree.write("/dev/neuron_x")
    _, (status, message) = examine.machine()
    assert status == "warning"
    assert message == "The driver has no device of the node /dev/neuron40; no container gets it"


def test_nodes_for_root_alone(examine: Examine) -> None:
    examine.mode = 0o600
    _, (status, message) = examine.machine(1)
    assert status == "warning"
    assert message.startswith("Not everybody may open /dev/neuron0")


def test_the_driver_root_is_looked_at(examine: Examine) -> None:
    config = Config()
    config.driver_roots = ("neuron=/driver",)
    examine.tree.config = config
    simulate(NodesOnPaper(str(examine.tree.root / "driver")), 2, {})
    statuses = examine()
    assert statuses[0] == ("ok", "AWS Neuron's driver 2.24.7.0 has 2 devices")

"""The doctor's findings on drivers, from the checks common to vendors, on simulated machines."""

from typing import Any

import pytest
from fabricated import Tree
from node_files import Machine
from samples import SAMPLES, having, rows

from gpuhook.base.config.loader import loads
from gpuhook.core import contract
from gpuhook.core.inventory.model import DeviceNode
from gpuhook.monitor.vendor_parts import part
from gpuhook.tools.doctor.case import VendorChecks, step_of
from gpuhook.tools.doctor.driver import default_checks
from gpuhook.vendors import registry

Found = list[tuple[str, str]]


class Examine:
    """The doctor on a simulated machine, whose device nodes are recorded but not created."""

    def __init__(self, tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tree = tree
        self._monkeypatch = monkeypatch

    def machine(self, vendor: str, count: int = 4, **settings: Any) -> Found:
        return self(vendor, Machine(vendor, self.tree.root, count, **settings))

    def __call__(self, vendor: str, made: Machine | None = None) -> Found:
        """Return status and message of each finding."""
        names = registry.BUILT_IN[vendor]
        module = part("tools", names, "doctor")
        checks: VendorChecks = module.CHECKS if module else default_checks(names)
        [check] = map(step_of, checks.driver)
        if made is not None:
            loaded = contract.load(names)
            look = made.look
            self._monkeypatch.setattr(loaded, "discover", lambda _: look(), raising=False)
        findings = [*check.check(self.tree.case)]
        assert {each.check for each in findings} <= {check.name}
        return [(str(each.status), each.message) for each in findings]


@pytest.fixture
def examine(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> Examine:
    return Examine(tree, monkeypatch)


@pytest.mark.parametrize("vendor", having("in_order"))
def test_a_machine_in_order_has_one_ok_finding(examine: Examine, vendor: str) -> None:
    assert examine.machine(vendor) == [("ok", SAMPLES[vendor].in_order)]


@pytest.mark.parametrize(
    ("vendor", "expected"),
    [
        ("neuron", [("warning", "AWS Neuron's driver has no device")]),
        ("gaudi", [("warning", "Intel Gaudi's driver has no device")]),
        ("intel_gpu", []),
        ("intel_npu", []),
    ],
)
def test_a_driver_without_devices_warns_only_for_neuron_and_gaudi(
    examine: Examine, vendor: str, expected: Found
) -> None:
    assert examine.machine(vendor, 0) == expected


@pytest.mark.parametrize(
    ("vendor", "theirs", "device", "expected"),
    [
        ("neuron", "0x1d0f", "0xec20", []),  # a network card
        ("neuron", "0x1d0f", "0x7164", [("failure", "AWS Neuron's driver isn't loaded")]),
        ("gaudi", "0x8086", "0x1020", []),  # another vendor's device
        ("gaudi", "0x1da3", "0x1020", [("failure", "Intel Gaudi's driver isn't loaded")]),
    ],
)
def test_only_a_machine_with_devices_needs_a_driver(
    examine: Examine, vendor: str, theirs: str, device: str, expected: Found
) -> None:
    assert examine(vendor) == []
    examine.tree.write("/sys/bus/pci/devices/0000:10:00.0/vendor", f"{theirs}\n")
    examine.tree.write("/sys/bus/pci/devices/0000:10:00.0/device", f"{device}\n")
    assert examine(vendor) == expected


@pytest.mark.parametrize(
    ("vendor", "message"),
    [
        ("intel_gpu", "Intel's GPU driver isn't loaded"),
        ("intel_npu", "Intel's NPU driver isn't loaded"),
    ],
)
def test_a_configured_driver_root_without_a_driver_is_a_failure(
    examine: Examine, vendor: str, message: str
) -> None:
    (examine.tree.root / "driver").mkdir(parents=True)
    examine.tree.config = loads(f'gpuhook.driver-roots = ["{vendor}=/driver"]\n')
    assert examine(vendor) == [("failure", message)]
    examine.tree.config = loads(f'gpuhook.driver-roots = ["{vendor}=/driver/nothing"]\n')
    [(status, message)] = examine(vendor)
    assert status == "failure"
    assert "can't be read" in message


@pytest.mark.parametrize(("vendor", "finding"), rows("findings"))
def test_driver_problems_are_reported_by_the_doctor(
    examine: Examine, vendor: str, finding: tuple[dict[str, Any], str, str]
) -> None:
    settings, status, message = finding
    (fine, _), (found, said) = examine.machine(vendor, **settings)
    assert (fine, found) == ("ok", status)
    assert said.startswith(message)


@pytest.mark.parametrize(
    ("vendor", "path", "device"),
    [
        ("intel_gpu", "/dev/dri/card1", "GPU 1 (card1)"),
        ("intel_npu", "/dev/accel/accel1", "NPU 1 (accel1)"),
    ],
)
def test_a_node_with_wrong_numbers_gives_a_warning(
    examine: Examine, vendor: str, path: str, device: str
) -> None:
    made = Machine(vendor, examine.tree.root, 2)
    made.nodes[path] = DeviceNode(path, 9, 9)
    _, (status, message) = examine(vendor, made)
    assert status == "warning"
    assert message.startswith(f"{device} can't be used: {path} has the numbers 9:9")


@pytest.mark.parametrize(
    ("vendor", "path"), [("neuron", "/dev/neuron0"), ("gaudi", "/dev/accel/accel0")]
)
def test_nodes_only_root_can_open_cause_a_warning(examine: Examine, vendor: str, path: str) -> None:
    made = Machine(vendor, examine.tree.root, 1)
    for node in made.nodes.values():
        node.mode = 0o600
    _, (status, message) = examine(vendor, made)
    assert status == "warning"
    assert message.startswith(f"Not all users can open {path}")


@pytest.mark.parametrize(
    ("vendor", "message"),
    [
        ("neuron", "AWS Neuron's driver 2.24.7.0 has 2 devices"),
        ("gaudi", "Intel Gaudi's driver 1.24.0 has 2 devices"),
    ],
)
def test_devices_below_the_driver_root_are_examined(
    examine: Examine, vendor: str, message: str
) -> None:
    examine.tree.config = loads(f'gpuhook.driver-roots = ["{vendor}=/driver"]\n')
    Machine(vendor, examine.tree.root / "driver", 2)
    assert examine(vendor)[0] == ("ok", message)


def test_a_missing_connected_neuron_device_is_reported(examine: Examine) -> None:
    """The missing device is the last, so no gap shows it; its neighbour's connections do."""
    made = Machine("neuron", examine.tree.root, 3)
    made.write("/sys/class/neuron_device/neuron2/connected_devices", "1, 3\n")
    assert examine("neuron", made)[1][1].startswith("There is no Neuron device 3")


def test_a_neuron_node_without_a_device_gives_a_warning(examine: Examine) -> None:
    examine.tree.write("/dev/neuron40")
    examine.tree.write("/dev/neuron_x")
    _, (status, message) = examine.machine("neuron")
    assert status == "warning"
    assert message == "The driver has no device of the node /dev/neuron40; no container gets it"

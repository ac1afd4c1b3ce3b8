"""Intel's NPUs: what is found below a driver root, and what containers get."""

from collections.abc import Callable
from pathlib import Path

import pytest
from fabricated import Tree
from node_files import Machine, machine
from paper import spec_with
from steps import resolve

from gpuhook.ground.config.model import Config
from gpuhook.ground.errors import DriverError, SimulateError, UnknownDeviceError
from gpuhook.start.cdi.generate import Source, generate
from gpuhook.start.inventory import freshness
from gpuhook.start.inventory.model import Inventory, Node
from gpuhook.start.resolve import Resolved
from gpuhook.tools.vendors.intel_npu import doctor
from gpuhook.vendors.intel_npu import discover
from gpuhook.vendors.intel_npu.vendor import VENDOR

ASK = "INTEL_VISIBLE_NPUS"
DRIVER = "sys/bus/pci/drivers/intel_vpu"


def resolved(found: Inventory, *env: str, **others: Inventory) -> Resolved:
    answer = resolve(spec_with(*env), Config(), inventories={"intel_npu": found, **others})
    assert answer is not None
    return answer


def test_what_discover_finds(tmp_path: Path) -> None:
    """Another maker's accel0 is none of them."""
    found = machine("intel_npu", tmp_path, 12, first=1, decoy="yes")
    assert [device.label for device in found.devices] == [str(n) for n in range(1, 13)]
    first = found.devices[0]
    assert (first.id, first.bus_id, first.model) == ("accel1", "0000:01:0b.0", "Intel NPU 7d1d")
    assert found.version == "intel_vpu"
    assert [node.path for node in found.nodes] == [f"/dev/accel/accel{n}" for n in range(1, 13)]


@pytest.mark.parametrize(
    ("asked", "ids"),
    [
        ("0", ("accel0",)),
        ("1-2,0", ("accel1", "accel2", "accel0")),
        ("accel2", ("accel2",)),
        ("01:0b.0", ("accel1",)),
        ("all", ("accel0", "accel1", "accel2")),
        ("intel.com/npu=0", ("accel0",)),
        ("intel.com/npu=npu1", ("accel1",)),
    ],
)
def test_which_are_meant(tmp_path: Path, asked: str, ids: tuple[str, ...]) -> None:
    answer = resolved(machine("intel_npu", tmp_path, 3), f"{ASK}={asked}")
    assert answer.ids == ids
    assert set(answer.groups) == {106}


def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    found = machine("intel_npu", tmp_path, 1, first=1, decoy="yes")
    with pytest.raises(UnknownDeviceError, match=r"no NPU '0': it has 1 \(accel1\)"):
        resolved(found, f"{ASK}=0")


def test_a_gpu_and_an_npu(tmp_path: Path) -> None:
    gpus = machine("intel_gpu", tmp_path / "gpu", 1)
    npus = machine("intel_npu", tmp_path / "npu", 1)
    answer = resolved(npus, f"{ASK}=0", "INTEL_VISIBLE_DEVICES=0", intel_gpu=gpus)
    assert answer.ids == ("card0", "accel0")


def test_nodes_that_are_missing_or_wrong(tmp_path: Path) -> None:
    made = Machine("intel_npu", tmp_path, 2, no_node=0)
    made.nodes["/dev/accel/accel1"] = Node("/dev/accel/accel1", 9, 9)
    found = made.look()
    with pytest.raises(DriverError, match="has no node /dev/accel/accel0"):
        resolved(found, f"{ASK}=0")
    assert found.devices[1].state.startswith("/dev/accel/accel1 has the numbers 9:9")


@pytest.mark.parametrize("root", ["nothing", "empty"])
def test_no_driver(tmp_path: Path, root: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        DriverError, match=r"^Intel('s NPU driver isn't| NPU's driver root .* can't be)"
    ):
        discover.discover(str(tmp_path / root))


@pytest.mark.parametrize(
    "change",
    [
        lambda root: (root / DRIVER / "0000:00:0b.0").unlink(),
        lambda root: (root / DRIVER / "0000:00:0b.0/accel/accel9").mkdir(),
        lambda root: (root / "dev/accel/accel0").unlink(),
    ],
)
def test_a_change_is_noticed(tmp_path: Path, change: Callable[[Path], None]) -> None:
    Machine("intel_npu", tmp_path, 2)
    config = Config()
    config.driver_roots = (f"intel_npu={tmp_path}",)
    before = freshness.surroundings(config, VENDOR)
    change(tmp_path)
    assert freshness.surroundings(config, VENDOR) != before


def test_a_cdi_document(tmp_path: Path) -> None:
    found = machine("intel_npu", tmp_path, 2)
    document = generate(Source(VENDOR, found, Config(), "/hook")).document
    assert document["kind"] == "intel.com/npu"
    names = [device["name"] for device in document["devices"]]
    assert names == ["0", "1", "accel0", "accel1", "all"]
    assert "hooks" not in document["containerEdits"]


def test_the_doctor(tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def findings() -> list[tuple[str, str]]:
        return [(str(each.status), each.message) for each in doctor.intel_npus(tree.case)]

    assert findings() == []
    tree.case.config.driver_roots = (f"intel_npu={tmp_path}",)
    assert findings() == [("failure", "Intel's NPU driver isn't loaded")]
    made = Machine("intel_npu", tmp_path, 2, no_node=0)
    made.nodes["/dev/accel/accel1"] = Node("/dev/accel/accel1", 9, 9)
    monkeypatch.setattr(VENDOR, "discover", lambda _: made.look(), raising=False)
    found = findings()
    assert found[0] == ("ok", "The driver intel_vpu has 2 NPUs")
    assert found[1] == ("failure", "Intel's driver has no node /dev/accel/accel0")
    assert found[2][0] == "warning"


def test_what_the_simulator_refuses(tmp_path: Path) -> None:
    with pytest.raises(SimulateError, match="has no setting 'colour'"):
        Machine("intel_npu", tmp_path, 1, colour="red")

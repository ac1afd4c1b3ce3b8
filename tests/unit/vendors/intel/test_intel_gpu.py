"""Intel's GPUs: what is found below a driver root, and what containers get."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import machines
import pytest
from fabricated import Tree
from node_files import Machine, machine
from paper import spec_with
from steps import resolve

from gpuhook.ground.config.model import Config
from gpuhook.ground.errors import DriverError, LostDeviceError, SimulateError, UnknownDeviceError
from gpuhook.start.cdi.generate import Source, generate
from gpuhook.start.inventory import freshness
from gpuhook.start.inventory.model import Inventory, Node
from gpuhook.start.plan import image
from gpuhook.start.plan.operations import Plan
from gpuhook.start.planner import make_plan
from gpuhook.start.resolve import Resolved
from gpuhook.tools.vendors.intel_gpu import doctor
from gpuhook.vendors.intel_gpu import discover
from gpuhook.vendors.intel_gpu.vendor import VENDOR

ASK = "INTEL_VISIBLE_DEVICES"
DRIVERS = "sys/bus/pci/drivers"


@pytest.fixture
def gpus(tmp_path: Path) -> Inventory:
    """Three GPUs from card1 on, the last with two virtual functions; two more are virtual's."""
    found: Inventory = machine("intel_gpu", tmp_path / "intel", 3, cards=1, vfs=2, vm=2)
    return found


def resolved(found: Inventory, *env: str, **others: Inventory) -> Resolved:
    every = {"intel_gpu": found, **others}
    answer = resolve(spec_with(*env), Config(), inventories=every)
    assert answer is not None
    return answer


def planned(found: Inventory, *env: str, **others: Inventory) -> Plan:
    answer = resolved(found, *env, **others)
    return make_plan(answer.grants, image.unknown(), answer.groups)


def of_kind(plan: Plan, kind: str) -> list[dict[str, Any]]:
    return [op.to_json() for op in plan.operations if op.kind == kind]


# What is found -------------------------------------------------------------------------------


def test_what_discover_finds(gpus: Inventory) -> None:
    assert gpus.version == "i915"
    assert [device.label for device in gpus.devices] == ["0", "1", "2", "2.0", "2.1"]
    first, *_, part = gpus.devices
    assert first.id == "card1"
    assert first.bus_id == "0000:03:00.0"
    assert first.model == "Intel Data Center GPU Flex 170"
    assert first.nodes == ("/dev/dri/card1", "/dev/dri/renderD129")
    assert (part.parent, part.bus_id) == ("card3", "0000:05:00.2")
    assert gpus.missing() == []
    assert Inventory.from_json(gpus.to_json()) == gpus


def test_ten_and_more_are_in_the_order_of_their_addresses(tmp_path: Path) -> None:
    found = machine("intel_gpu", tmp_path, 20, driver="xe")
    assert found.version == "xe"
    assert [device.label for device in found.devices] == [str(number) for number in range(20)]
    assert [device.id for device in found.devices] == [f"card{number}" for number in range(20)]


def test_both_drivers(tmp_path: Path) -> None:
    made = Machine("intel_gpu", tmp_path, 2)
    (tmp_path / DRIVERS / "xe").mkdir()
    (tmp_path / DRIVERS / "i915/0000:03:00.0").rename(tmp_path / DRIVERS / "xe/0000:03:00.0")
    found = made.look()
    assert found.version == "i915 and xe"
    assert [device.bus_id for device in found.devices] == ["0000:03:00.0", "0000:04:00.0"]


def test_a_gpu_without_a_render_node(tmp_path: Path) -> None:
    first, second = machine("intel_gpu", tmp_path, 2, no_render=0).devices
    assert first.nodes == ("/dev/dri/card0",)
    assert second.nodes == ("/dev/dri/card1", "/dev/dri/renderD129")


def test_new_virtual_functions_move_no_number(tmp_path: Path) -> None:
    made = Machine("intel_gpu", tmp_path, 3, vfs=1)
    devices = tmp_path / "sys/devices/pci0000:00"
    (devices / "0000:05:00.1/physfn").unlink()
    (devices / "0000:05:00.1/physfn").symlink_to("../0000:03:00.0")
    assert [device.label for device in made.look().devices] == ["0", "0.0", "1", "2"]


def test_a_virtual_function_whose_gpu_is_elsewhere(tmp_path: Path) -> None:
    """The GPU itself may be bound to another driver: then it is one like any other."""
    made = Machine("intel_gpu", tmp_path, 1, vfs=1)
    (tmp_path / DRIVERS / "i915/0000:03:00.0").unlink()
    [device] = made.look().devices
    assert (device.label, device.parent, device.names["index"]) == ("0", "", ("0",))


def _no_attributes(made: Machine) -> None:
    for name in ("device", "vendor", "class"):
        (made.place / f"sys/devices/pci0000:00/0000:04:00.0/{name}").unlink()


def _odd_names(made: Machine) -> None:
    folder = made.place / "sys/devices/pci0000:00/0000:04:00.0/drm"
    for name in ("card", "card1-DP-1", "controlD64", "renderD", "card٣"):
        (folder / name).mkdir()
    (made.place / DRIVERS / "i915/module").mkdir()


def _half_bound(made: Machine) -> None:
    (made.place / DRIVERS / "i915/0000:09:00.0").mkdir()
    (made.place / DRIVERS / "i915/0000:0a:00.0").symlink_to("/nowhere")


@pytest.mark.parametrize("harm", [_no_attributes, _odd_names, _half_bound])
def test_sysfs_that_lacks_something(tmp_path: Path, harm: Callable[[Machine], None]) -> None:
    made = Machine("intel_gpu", tmp_path, 2)
    harm(made)
    found = made.look()
    assert [device.label for device in found.devices] == ["0", "1"]
    assert found.devices[1].nodes == ("/dev/dri/card1", "/dev/dri/renderD129")


def test_a_node_with_other_numbers_than_the_drivers(tmp_path: Path) -> None:
    made = Machine("intel_gpu", tmp_path, 2)
    made.nodes["/dev/dri/renderD129"] = Node("/dev/dri/renderD129", 9, 9)
    found = made.look()
    assert [bool(device.state) for device in found.devices] == [False, True]
    assert resolved(found, f"{ASK}=all").ids == ("card0",)
    with pytest.raises(LostDeviceError, match="renderD129 has the numbers 9:9"):
        resolved(found, f"{ASK}=1")


@pytest.mark.parametrize("root", ["nothing", "empty"])
def test_no_driver(tmp_path: Path, root: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DriverError, match=r"^Intel's (GPU driver isn't|driver root .* can't be)"):
        discover.discover(str(tmp_path / root))


def test_a_driver_without_devices(tmp_path: Path) -> None:
    assert machine("intel_gpu", tmp_path, 0).devices == ()


@pytest.mark.parametrize(
    "change",
    [
        lambda root: (root / DRIVERS / "i915/0000:04:00.0").unlink(),
        lambda root: (root / "sys/devices/pci0000:00/0000:03:00.0/drm/card7").mkdir(),
        lambda root: (root / DRIVERS / "xe").mkdir(),
        lambda root: shutil.rmtree(root / "dev/dri"),
    ],
)
def test_a_change_is_noticed(tmp_path: Path, change: Callable[[Path], None]) -> None:
    Machine("intel_gpu", tmp_path, 2)
    config = Config()
    config.driver_roots = (f"intel_gpu={tmp_path}",)
    before = freshness.surroundings(config, VENDOR)
    assert freshness.surroundings(config, VENDOR) == before
    change(tmp_path)
    assert freshness.surroundings(config, VENDOR) != before


# What containers get -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "ids"),
    [
        ("0", ["card1"]),
        ("0 - 1, 1", ["card1", "card2"]),
        ("card3", ["card3"]),
        ("2.1", ["card5"]),
        ("0000-04-00-0-0x56c0", ["card2"]),
        ("04:00.0", ["card2"]),
        ("all", ["card1", "card2", "card3", "card4", "card5"]),
        ("intel.com/gpu=card2", ["card2"]),
        ("intel.com/gpu=gpu0", ["card1"]),
        ("intel.com/gpu=vf2.0", ["card4"]),
        ("none", []),
    ],
)
def test_which_are_meant(gpus: Inventory, asked: str, ids: list[str]) -> None:
    assert list(resolved(gpus, f"{ASK}={asked}").ids) == ids


@pytest.mark.parametrize("asked", ["3", "card0", "card", "2.2", "renderD129", "0000:06:00.0"])
def test_what_is_not_there_is_refused(gpus: Inventory, asked: str) -> None:
    with pytest.raises(UnknownDeviceError, match=r"it has 0 \(card1\), 1 \(card2\), 2 \(card3\)"):
        resolved(gpus, f"{ASK}={asked}")


def test_what_a_container_gets(gpus: Inventory) -> None:
    plan = planned(gpus, f"{ASK}=1")
    assert [op["destination"] for op in of_kind(plan, "device")] == [
        "/dev/dri/card2",
        "/dev/dri/renderD130",
    ]
    assert {(op["destination"], op["target"]) for op in of_kind(plan, "symlink")} == {
        ("/dev/dri/by-path/pci-0000:04:00.0-card", "../card2"),
        ("/dev/dri/by-path/pci-0000:04:00.0-render", "../renderD130"),
    }
    assert {op["gid"] for op in of_kind(plan, "group")} == {44, 106}
    numbers = {node.path: node.numbers for node in gpus.nodes}
    assert plan.devices == [numbers["/dev/dri/card2"], numbers["/dev/dri/renderD130"]]


def test_a_node_that_is_missing(tmp_path: Path) -> None:
    made = Machine("intel_gpu", tmp_path, 2, no_node=1)
    found = made.look()
    assert resolved(found, f"{ASK}=0").ids == ("card0",)
    with pytest.raises(DriverError, match="Intel's driver has no node /dev/dri/card1"):
        resolved(found, f"{ASK}=1")


def test_beside_nvidia(gpus: Inventory) -> None:
    nvidia = machines.machine(machines.gpu(0, 3))
    plan = planned(gpus, f"{ASK}=0", "NVIDIA_VISIBLE_DEVICES=0", nvidia=nvidia)
    places = {op["destination"] for op in of_kind(plan, "device")}
    assert {"/dev/dri/card1", "/dev/nvidia3"} < places


def test_a_cdi_document(gpus: Inventory) -> None:
    document = generate(Source(VENDOR, gpus, Config(), "/hook")).document
    names = {device["name"]: device["containerEdits"] for device in document["devices"]}
    assert {"0", "card1", "1", "card2", "2.0", "card4", "all"} < {*names}
    assert [node["path"] for node in names["card1"]["deviceNodes"]] == [
        "/dev/dri/card1",
        "/dev/dri/renderD129",
    ]
    assert set(names["card1"]["additionalGids"]) == {44, 106}
    common = document["containerEdits"]
    assert common["env"] == [f"{ASK}=void"]
    assert common["hooks"][0]["args"][-1] == "intel.com/gpu"  # which makes the links


# The doctor, the simulator -------------------------------------------------------------------


@pytest.fixture
def examine(
    tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[tuple[str, str]]]:
    def run(made: Machine | None = None, root: Path | None = None) -> list[tuple[str, str]]:
        case = tree.case
        case.config.driver_roots = (f"intel_gpu={root or '/'}",)
        if made is not None:
            monkeypatch.setattr(VENDOR, "discover", lambda _: made.look(), raising=False)
        return [(str(each.status), each.message) for each in doctor.intel_gpus(case)]

    return run


def test_a_machine_in_order(examine: Any, tmp_path: Path) -> None:
    found = examine(Machine("intel_gpu", tmp_path / "intel", 3))
    assert found == [("ok", "Intel's driver i915 has 3 GPUs")]
    assert examine(Machine("intel_gpu", tmp_path / "none", 0)) == []


def test_nodes_that_are_missing_or_wrong(examine: Any, tmp_path: Path) -> None:
    made = Machine("intel_gpu", tmp_path / "intel", 2, no_node=0)
    made.nodes["/dev/dri/card1"] = Node("/dev/dri/card1", 9, 9)
    found = examine(made)
    assert ("failure", "Intel's driver has no node /dev/dri/card0, /dev/dri/renderD128") in found
    assert [status for status, text in found if "GPU 1 (card1) can't be used" in text] == [
        "warning"
    ]


def test_a_gpu_without_its_driver(examine: Any, tmp_path: Path) -> None:
    assert examine(root=tmp_path / "nothing")[0][0] == "failure"
    Machine("intel_gpu", tmp_path / "intel", 1)
    shutil.rmtree(tmp_path / "intel/sys/bus/pci/drivers")
    assert examine(root=tmp_path / "intel") == [("failure", "Intel's GPU driver isn't loaded")]


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"colour": "red"}, "has no setting 'colour'"), ({"driver": "nouveau"}, "isn't a driver of")],
)
def test_what_the_simulator_refuses(tmp_path: Path, settings: dict[str, str], message: str) -> None:
    with pytest.raises(SimulateError, match=message):
        Machine("intel_gpu", tmp_path, 1, **settings)

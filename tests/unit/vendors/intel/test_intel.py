"""Intel GPUs and NPUs: discovery below a driver root, and content of containers."""

from collections.abc import Callable
from pathlib import Path

import pytest
from asking import of_kind, planned, resolved
from node_files import Machine, machine

from gpuhook.base.config.model import Config
from gpuhook.base.errors import UnknownDeviceError
from gpuhook.core.cdi.generate import SpecSource, generate
from gpuhook.core.inventory.model import Inventory
from gpuhook.vendors.intel_gpu.vendor import VENDOR
from gpuhook.vendors.intel_npu.vendor import VENDOR as NPUS

ASK = "INTEL_VISIBLE_DEVICES"
DRIVERS = "sys/bus/pci/drivers"


@pytest.fixture
def gpus(tmp_path: Path) -> Inventory:
    """Three GPUs from card1 on, the last with two virtual functions; VMs have two more."""
    found: Inventory = machine("intel_gpu", tmp_path / "intel", 3, cards=1, vfs=2, vm=2)
    return found


# What is found -------------------------------------------------------------------------------


def test_discovery_finds_intel_gpus_and_virtual_functions(gpus: Inventory) -> None:
    assert gpus.version == "i915"
    assert [device.label for device in gpus.devices] == ["0", "1", "2", "2.0", "2.1"]
    first, *_, part = gpus.devices
    assert first.id == "card1"
    assert first.bus_id == "0000:03:00.0"
    assert first.model == "Intel Data Center GPU Flex 170"
    assert first.nodes == ("/dev/dri/card1", "/dev/dri/renderD129")
    assert (part.parent, part.bus_id) == ("card3", "0000:05:00.2")
    assert gpus.missing() == []


def test_gpus_of_i915_and_xe_are_found_together(tmp_path: Path) -> None:
    made = Machine("intel_gpu", tmp_path, 2)
    (tmp_path / DRIVERS / "xe").mkdir()
    (tmp_path / DRIVERS / "i915/0000:03:00.0").rename(tmp_path / DRIVERS / "xe/0000:03:00.0")
    found = made.look()
    assert found.version == "i915 and xe"
    assert [device.bus_id for device in found.devices] == ["0000:03:00.0", "0000:04:00.0"]


def test_a_gpu_without_a_render_node_has_only_its_card_node(tmp_path: Path) -> None:
    first, second = machine("intel_gpu", tmp_path, 2, no_render=0).devices
    assert first.nodes == ("/dev/dri/card0",)
    assert second.nodes == ("/dev/dri/card1", "/dev/dri/renderD129")


def test_virtual_functions_do_not_change_gpu_numbers(tmp_path: Path) -> None:
    made = Machine("intel_gpu", tmp_path, 3, vfs=1)
    devices = tmp_path / "sys/devices/pci0000:00"
    (devices / "0000:05:00.1/physfn").unlink()
    (devices / "0000:05:00.1/physfn").symlink_to("../0000:03:00.0")
    assert [device.label for device in made.look().devices] == ["0", "0.0", "1", "2"]


def test_a_virtual_function_without_its_gpu_counts_as_a_gpu(tmp_path: Path) -> None:
    """If the GPU itself is bound to another driver, the function is a GPU like any other."""
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
def test_incomplete_sysfs_still_gives_all_gpus(
    tmp_path: Path, harm: Callable[[Machine], None]
) -> None:
    made = Machine("intel_gpu", tmp_path, 2)
    harm(made)
    found = made.look()
    assert [device.label for device in found.devices] == ["0", "1"]
    assert found.devices[1].nodes == ("/dev/dri/card1", "/dev/dri/renderD129")


# What containers get -------------------------------------------------------------------------


def test_a_container_gets_nodes_links_and_groups_of_its_intel_gpu(gpus: Inventory) -> None:
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


def test_a_cdi_spec_names_every_gpu_with_nodes_and_groups(gpus: Inventory) -> None:
    document = generate(SpecSource(VENDOR, gpus, Config(), "/hook")).document
    names = {device["name"]: device["containerEdits"] for device in document["devices"]}
    assert {"0", "card1", "1", "card2", "2.0", "card4", "all"} < {*names}
    assert [node["path"] for node in names["card1"]["deviceNodes"]] == [
        "/dev/dri/card1",
        "/dev/dri/renderD129",
    ]
    assert set(names["card1"]["additionalGids"]) == {44, 106}
    common = document["containerEdits"]
    assert common["env"] == [f"{ASK}=void"]
    assert common["hooks"][0]["args"][-1] == "intel.com/gpu"  # this hook creates the links


# NPUs ----------------------------------------------------------------------------------------


def test_only_intel_npus_are_found_and_named_in_the_cdi_spec(tmp_path: Path) -> None:
    """The host's accel0 belongs to another vendor."""
    found = machine("intel_npu", tmp_path, 2, first=1, decoy="yes")
    first = found.devices[0]
    assert (first.id, first.bus_id, first.model) == ("accel1", "0000:01:0b.0", "Intel NPU 7d1d")
    assert found.version == "intel_vpu"
    assert [node.path for node in found.nodes] == ["/dev/accel/accel1", "/dev/accel/accel2"]
    with pytest.raises(UnknownDeviceError, match=r"no NPU '0': it has 1 \(accel1\), 2 \(accel2\)"):
        resolved(found, "INTEL_VISIBLE_NPUS=0")
    document = generate(SpecSource(NPUS, found, Config(), "/hook")).document
    assert [device["name"] for device in document["devices"]] == [
        "1", "2", "accel1", "accel2", "all",
    ]  # fmt: skip


def test_a_gpu_and_an_npu_are_selected_together(tmp_path: Path) -> None:
    gpus = machine("intel_gpu", tmp_path / "gpu", 1)
    npus = machine("intel_npu", tmp_path / "npu", 1)
    answer = resolved(npus, "INTEL_VISIBLE_NPUS=0", f"{ASK}=0", beside=[gpus])
    assert answer.ids == ("card0", "accel0")

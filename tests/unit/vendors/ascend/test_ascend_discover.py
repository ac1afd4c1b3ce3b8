"""Discovery of Ascend devices below a driver root, with files in any state."""

import ctypes
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from node_files import Machine, machine

from gpuhook.vendors.ascend import discover
from gpuhook.vendors.ascend.model import PCI_DRIVER, AscendInventory
from gpuhook_simulate.vendors.ascend import CHIPS as SIMULATED

Case = dict[str, Any]
CLASS = "sys/class/devdrv-class"


def labels(found: AscendInventory) -> list[str]:
    return [device.label for device in found.devices]


def shared(found: AscendInventory) -> set[str]:
    """Return the paths in a container of the nodes that belong to every device."""
    nodes = [found.node(path) for path in found.control]
    return {node.inside or node.path for node in nodes if node}


def test_discovery_finds_ascend_npus_and_vnpus(tmp_path: Path) -> None:
    found = machine("ascend", tmp_path, 3, vnpus="116,117", decoys="yes")
    assert found.version == "24.1.rc3"
    assert labels(found) == ["0", "1", "2", "116", "117"]
    first, split, _, part, _ = found.devices
    assert (first.id, first.bus_id, first.model) == ("npu-0", "0000:01:00.0", "Ascend 910B")
    assert split.state == "it is split into vNPUs"
    assert (part.id, part.parent, part.bus_id) == ("vnpu-116", "npu-1", split.bus_id)
    [node] = [node for node in found.nodes if node.path == "/dev/vdavinci116"]
    assert node.inside == "/dev/davinci116"
    assert (node.mode, node.gid) == (0o660, 1000)


def test_npus_listed_only_in_the_driver_class_are_found(tmp_path: Path) -> None:
    found = machine("ascend", tmp_path, 11, pci="no", chip="310B")
    assert labels(found) == [str(number) for number in range(11)]
    assert found.devices[10].bus_id == ""


def test_devices_are_found_by_nodes_without_sysfs_numbers(tmp_path: Path) -> None:
    """Without sysfs, nodes count if their major number is the driver's own."""
    made = Machine("ascend", tmp_path, 2, pci="no", chip="310B", vnpus="100", decoys="yes")
    shutil.rmtree(tmp_path / CLASS)
    assert labels(made.look()) == ["0", "1", "100"]


def test_device_numbers_are_the_drivers_and_not_the_bus_order(tmp_path: Path) -> None:
    found = machine("ascend", tmp_path, numbers="5,0")
    assert {device.label: device.bus_id for device in found.devices} == {
        "5": "0000:01:00.0",
        "0": "0000:02:00.0",
    }


def _no_table(made: Machine) -> None:
    (made.place / f".{PCI_DRIVER}/0000:02:00.0/devdrv_sysfs_bdf_to_devid").unlink()


def _odd_table(made: Machine) -> None:
    path = f"{PCI_DRIVER}/0000:02:00.0/devdrv_sysfs_bdf_to_devid"
    made.write(path, "bdf udevid\n02:00.0 -1 x\n\n02:00.0\n09:00.0 9 0\n")


def _unreadable(made: Machine) -> None:
    for path in (made.place / f".{PCI_DRIVER}").resolve().glob("*/model*"):
        path.unlink()
    folder = made.place / f".{PCI_DRIVER}/0000:02:00.0/bus_name"
    folder.unlink()
    folder.mkdir()


def _half_made(made: Machine) -> None:
    shutil.rmtree(made.place / CLASS)
    (made.place / CLASS / "davinci").mkdir(parents=True)
    (made.place / CLASS / "davinci0").mkdir()
    (made.place / CLASS / "davinci٣").mkdir()


@pytest.mark.parametrize("harm", [_no_table, _odd_table, _unreadable, _half_made])
def test_incomplete_sysfs_still_gives_all_devices(
    tmp_path: Path, harm: Callable[[Machine], None]
) -> None:
    made = Machine("ascend", tmp_path, 2)
    harm(made)
    found = made.look()
    assert labels(found) == ["0", "1"]
    assert found.devices[1].bus_id == "0000:02:00.0"


def test_one_pci_address_in_two_domains_means_two_npus(tmp_path: Path) -> None:
    """The driver's table has no domains, so it can't distinguish the two NPUs."""
    made = Machine("ascend", tmp_path, 1)
    shutil.rmtree(tmp_path / CLASS)
    devices, bound = tmp_path / "sys/devices/pci0000:00", tmp_path / PCI_DRIVER.lstrip("/")
    shutil.copytree(devices / "0000:01:00.0", devices / "0001:01:00.0", symlinks=True)
    (bound / "0001:01:00.0").symlink_to("../../../../devices/pci0000:00/0001:01:00.0")
    made.write(f"{PCI_DRIVER}/0001:01:00.0/dev_id", "4\n")
    made.write(f"{PCI_DRIVER}/0001:01:00.0/bus_name", "0001:01:00.0\n")
    assert {device.label: device.bus_id for device in made.look().devices} == {
        "0": "0000:01:00.0",
        "4": "0001:01:00.0",
    }


def test_two_dies_on_one_bus_address_are_two_devices(tmp_path: Path) -> None:
    made = Machine("ascend", tmp_path, 2)
    shutil.rmtree(tmp_path / "sys/devices/pci0000:00/0000:02:00.0")
    table = "bdf      udevid add_id\n01:00.0  0      0\n01:00.0  1      4\n"
    made.write(f"{PCI_DRIVER}/0000:01:00.0/devdrv_sysfs_bdf_to_devid", table)
    assert [device.bus_id for device in made.look().devices] == ["0000:01:00.0"] * 2


def test_missing_nodes_are_recorded(tmp_path: Path) -> None:
    found = machine("ascend", tmp_path, 2, missing="davinci1,hisi_hdc")
    assert "/dev/davinci1" in found.missing()
    assert "/dev/hisi_hdc" in found.missing()  # searched for again, but no device needs it
    assert "/dev/hisi_hdc" not in found.control


def test_nodes_with_generic_names_of_other_drivers_are_ignored(tmp_path: Path) -> None:
    """On a host with another chip, /dev/hdmi belongs to another driver."""
    made = Machine("ascend", tmp_path, 1)
    made.node("/dev/hdmi", 9, 9)
    made.node("/dev/davinci_manager_docker", 9, 9)
    assert set(made.look().control) == {"/dev/davinci_manager", *discover.SHARED}


def test_a_listed_path_that_appears_later_is_detected(tmp_path: Path) -> None:
    made = Machine("ascend", tmp_path, 1)
    made.write("/etc/ascend-docker-runtime.d/base.list", "/opt/later\n")
    assert "/opt/later" in made.look().missing()
    os.makedirs(tmp_path / "opt/later")
    assert "/opt/later" not in made.look().missing()


@pytest.mark.parametrize("chip", SIMULATED)
def test_every_simulated_chip_is_recognized(tmp_path: Path, chip: str) -> None:
    made = Machine("ascend", tmp_path, 1, chip=chip)
    assert discover.CHIPS[SIMULATED[chip][0]] == chip
    assert made.look().devices[0].model == f"Ascend {chip}"
    assert made.lines == [f"NPU 0: Ascend {chip} at 0000:01:00.0"]


def test_simulated_ascend_libraries_can_be_loaded(tmp_path: Path) -> None:
    Machine("ascend", tmp_path, 1)
    ctypes.CDLL(str(tmp_path / "usr/local/Ascend/driver/lib64/driver/libascend_hal.so"))


# The vendor's cases --------------------------------------------------------------------------

# The vendor's name of a chip family -> the chips in gpuhook that belong to it.
FAMILIES = {
    "Ascend310": {"310"},
    "Ascend310B": {"310B"},
    "Ascend310P": {"310P"},
    "Ascend910": {"910", "910B", "910C"},
    "Ascend910A5": {"950"},
}


@pytest.mark.vectors("vendor_ascend", "ascend.chip")
def test_chip_names_match_the_vectors(case: Case) -> None:
    """The vendor's library names chips; gpuhook uses PCI ids, so no chip is unknown."""
    chips = FAMILIES.get(str(case["expected"]["type"]), set())
    name = str(case["input"]["chip_name"]).removeprefix("Ascend").rstrip("X")
    known = [chip for chip in {*discover.CHIPS.values()} if name.startswith(chip)]
    ours = max(known, key=len, default="")
    assert (ours in chips) if chips else not ours


def chip_of(family: str) -> str:
    """Return the chip to simulate for the vendor's family; any chip for an unknown one."""
    return "950" if family == "Ascend910A5" else family.removeprefix("Ascend") or "910B"


def last_names(paths: list[str]) -> str:
    return ",".join(path.rpartition("/")[2] for path in paths)


@pytest.mark.vectors("vendor_ascend", "ascend.shared_nodes")
def test_shared_nodes_match_the_vectors(case: Case, tmp_path: Path) -> None:
    """The existing nodes determine the family, because gpuhook doesn't query the chip's name."""
    given, expected = case["input"], case["expected"]
    missing = list(given.get("missing", ()))
    if "Atlas 200" in given["product"]:
        missing += ["/dev/devmm_svm", "/dev/hisi_hdc"]
    names, ub = last_names(missing), ",".join(given.get("uburma") or ())
    made = Machine("ascend", tmp_path, 1, chip=chip_of(given["type"]), missing=names, ub=ub)
    if given.get("uburma_error"):
        made.write("/dev/uburma", "no folder")
    found = made.look()
    nodes = shared(found)
    if expected.get("error"):  # the vendor refuses unknown chips; gpuhook needs no chip name
        assert not given["type"] or "/dev/davinci_manager" in found.missing()
        return
    assert nodes == set(expected.get("nodes_any_order", nodes))
    assert len(nodes) == expected.get("count", len(nodes))


@pytest.mark.vectors("vendor_ascend", "ascend.common_nodes")
def test_common_nodes_match_the_vectors(case: Case, tmp_path: Path) -> None:
    found = machine("ascend", tmp_path, 1, chip=chip_of(case["input"]["type"]))
    assert set(case["expected"].get("nodes_any_order", ())) <= shared(found)


@pytest.mark.vectors("vendor_ascend", "ascend.manager_node")
def test_manager_node_matches_the_vectors(case: Case, tmp_path: Path) -> None:
    managers = ["/dev/davinci_manager", "/dev/davinci_manager_docker"]
    missing = [path for path in managers if path not in case["input"]["exists"]]
    chip = chip_of(case["input"]["type"])
    found = machine("ascend", tmp_path, 1, chip=chip, missing=last_names(missing))
    manager, expected = found.node(found.control[0]), case["expected"]
    if expected.get("error"):
        assert manager is None
        return
    assert manager.path == expected["host"]
    assert (manager.inside or manager.path) == expected["container"]


@pytest.mark.vectors("vendor_ascend", "ascend.container_path")
def test_container_paths_match_the_vectors(case: Case) -> None:
    given = case["input"]
    path = f"/dev/{given['kind']}{given['host']}"
    assert (discover._inside(path) or path) == case["expected"]["container"]


@pytest.mark.vectors("vendor_ascend", "ascend.driver_table")
def test_driver_table_rows_match_the_vectors(case: Case) -> None:
    found = [list(row) for row in discover.rows(case["input"]["text"])]
    assert found == case["expected"]["rows"]

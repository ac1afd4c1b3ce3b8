"""What gpuhook finds of Intel Gaudi below a driver root, whatever state its files are in."""

import os
from pathlib import Path
from typing import Any

import paper
import pytest

from gpuhook.vendors.gaudi import discover
from gpuhook.vendors.gaudi.model import Inventory

DRIVER = "sys/bus/pci/drivers/habanalabs"
FIRST = f"{DRIVER}/0000:19:00.0"


def found(root: Path) -> Inventory:
    return discover.discover(str(root))


def change(path: Path, text: str) -> None:
    path.unlink()
    path.write_text(text)


@pytest.mark.vectors("vendor_habana", "habana.device_type")
def test_models(case: dict[str, Any], tmp_path: Path) -> None:
    paper.machine("gaudi", tmp_path, 1)
    change(tmp_path / FIRST / "device_type", case["input"]["text"])
    [device] = found(tmp_path).devices
    # Theirs fails on an empty file; here the PCI id says the model.
    assert device.model.lower() == case["expected"].get("type", "gaudi2")


@pytest.mark.vectors("vendor_habana", "habana.bus_ids")
def test_bus_ids(case: dict[str, Any], tmp_path: Path) -> None:
    files, indexes = case["input"]["files"], case["input"]["indexes"]
    addresses = [files[f"sys/class/accel/accel{index}/device/pci_addr"] for index in indexes]
    made = paper.machine("gaudi", tmp_path, len(indexes), addresses=",".join(addresses))
    assert {each.label: each.bus_id for each in made.devices} == case["expected"]["bus_ids"]


def test_numbers_are_the_drivers_and_not_the_buss(tmp_path: Path) -> None:
    made = paper.machine("gaudi", tmp_path, 2, addresses="0000:b3:00.0,0000:19:00.0")
    assert [(each.label, each.id) for each in made.devices] == [
        ("0", "0000:b3:00.0"),
        ("1", "0000:19:00.0"),
    ]


def test_devices_of_other_drivers_are_none(tmp_path: Path) -> None:
    made = paper.machine("gaudi", tmp_path, 2)
    assert (tmp_path / "sys/bus/pci/drivers/intel_vpu/0000:00:0b.0/accel/accel2/dev").exists()
    assert [each.label for each in made.devices] == ["0", "1"]
    (tmp_path / DRIVER / "0000:19:00.0").unlink()  # unbound
    assert [each.label for each in found(tmp_path).devices] == ["1"]


@pytest.mark.parametrize("name", ["bind", "new_id", "module", "0000:19:00", "x:y:z.0", "a.b.c.d"])
def test_names_that_are_no_address(tmp_path: Path, name: str) -> None:
    paper.machine("gaudi", tmp_path, 1)
    (tmp_path / DRIVER / name).mkdir()
    assert len(found(tmp_path).devices) == 1


@pytest.mark.parametrize("status", ["In reset", "Disabled", "Needs reset", "In device creation"])
def test_states(tmp_path: Path, status: str) -> None:
    paper.machine("gaudi", tmp_path, 1)
    change(tmp_path / FIRST / "status", f"{status}\n")
    [device] = found(tmp_path).devices
    assert device.state == f"its status is {status}"


@pytest.mark.parametrize("name", ["status", "accel/accel0", "accel/accel_controlD0", "accel"])
def test_half_made_devices(tmp_path: Path, name: str) -> None:
    paper.machine("gaudi", tmp_path, 2)
    path = tmp_path / FIRST / name
    path.rename(tmp_path / "elsewhere")
    states = [bool(each.state) for each in found(tmp_path).devices]
    assert sorted(states) == [False, True]


def test_a_device_without_numbers_has_a_name(tmp_path: Path) -> None:
    made = paper.machine("gaudi", tmp_path, 2, no_accel="0")
    assert [each.label for each in made.devices] == ["1", "0000:19:00.0"]
    assert made.devices[1].state.startswith("the driver isn't done with it")


def test_without_rdma(tmp_path: Path) -> None:
    made = paper.machine("gaudi", tmp_path, 2, uverbs="1")
    assert [len(each.nodes) for each in made.devices] == [2, 3]


def test_files_that_are_something_else(tmp_path: Path) -> None:
    paper.machine("gaudi", tmp_path, 1)
    folder = tmp_path / FIRST
    for name in ("module_id", "device_type", "device"):
        (folder / name).unlink()
    os.mkfifo(folder / "module_id")
    (folder / "device_type").mkdir()
    (folder / "device").write_text("x" * (1 << 20))
    [device] = found(tmp_path).devices
    assert (device.model, device.state, list(device.names)) == ("", "", ["bus_id", "index"])


@pytest.mark.parametrize("text", ["", "-1", "x", "123456", "٣"])
def test_what_is_no_seat(text: str) -> None:
    assert discover.seat(text) == ""


def test_links_lead_nowhere_outside(tmp_path: Path) -> None:
    paper.machine("gaudi", tmp_path / "outside", 1)
    (tmp_path / "root" / DRIVER).mkdir(parents=True)
    (tmp_path / "root" / FIRST).symlink_to(tmp_path / "outside" / FIRST)
    [device] = found(tmp_path / "root").devices
    assert device.state == "its status is unknown"

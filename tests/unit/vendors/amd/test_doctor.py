"""What the doctor says of AMD's driver on machines made of files."""

from pathlib import Path

import amd_machine
import pytest

from gpuhook.ground.config.loader import loads
from gpuhook.ground.config.model import Config
from gpuhook.start.inventory.model import Inventory
from gpuhook.tools.doctor import Case, Finding
from gpuhook.tools.doctor.finding import Status
from gpuhook.tools.doctor.machine import Machine
from gpuhook.tools.vendors.amd import doctor
from gpuhook.vendors.amd import discover


def examined(root: Path, config: Config | None = None) -> list[Finding]:
    return list(doctor.amd_devices(Case(Machine(str(root)), config or Config(), "/bin")))


def by_check(findings: list[Finding], status: Status) -> dict[str, str]:
    return {each.check: each.message for each in findings if each.status is status}


@pytest.fixture
def _nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have all nodes be there, which a user can't make."""
    monkeypatch.setattr(doctor, "discover", lambda root: amd_machine.looked_at(Path(root)))


@pytest.mark.usefixtures("_nodes")
def test_all_is_well(tmp_path: Path) -> None:
    amd_machine.simulated(tmp_path, 2)
    assert by_check(examined(tmp_path), Status.OK) == {
        "amd-driver": "AMD's driver 6.12.12 is loaded",
        "amd-devices": "Containers can have 2 of AMD's GPUs and partitions",
    }
    assert len(examined(tmp_path)) == 2


def test_a_machine_without_amds_gpus_needs_no_driver(tmp_path: Path) -> None:
    assert examined(tmp_path) == []
    for name, vendor, sort in (("0000:01:00.0", "0x10de", "0x030200"), ("x", "0x1002", "0x060400")):
        amd_machine.write(tmp_path / f"sys/bus/pci/devices/{name}/vendor", vendor)
        amd_machine.write(tmp_path / f"sys/bus/pci/devices/{name}/class", sort)
    assert examined(tmp_path) == []


@pytest.mark.parametrize("sort", ["0x030000", "0x038000", "0x120000"])
def test_a_gpu_without_a_driver(tmp_path: Path, sort: str) -> None:
    amd_machine.write(tmp_path / "sys/bus/pci/devices/0000:05:00.0/vendor", "0x1002")
    amd_machine.write(tmp_path / "sys/bus/pci/devices/0000:05:00.0/class", sort)
    [found] = examined(tmp_path)
    assert (found.check, found.status) == ("amd-driver", Status.FAILURE)
    assert "amdgpu isn't loaded" in found.message


def test_nodes_that_are_missing(tmp_path: Path) -> None:
    amd_machine.simulated(tmp_path, 1)
    found = by_check(examined(tmp_path), Status.FAILURE)
    assert "no node /dev/kfd, /dev/dri/card0, /dev/dri/renderD128" in found["amd-nodes"]


@pytest.mark.usefixtures("_nodes")
def test_gpus_that_kfd_does_not_know(tmp_path: Path) -> None:
    amd_machine.simulated(tmp_path, 3, unknown="0,2")
    found = by_check(examined(tmp_path), Status.WARNING)
    assert "doesn't know the GPU at 0000:05:00.0, 0000:0b:00.0" in found["amd-devices"]


@pytest.mark.usefixtures("_nodes")
def test_groups_that_nobody_is_put_in(tmp_path: Path) -> None:
    amd_machine.simulated(tmp_path, 1)
    config = loads("[features]\nno-additional-gids-for-device-nodes = true\n")
    found = by_check(examined(tmp_path, config), Status.WARNING)
    assert "for the groups 105, and no container's process" in found["amd-groups"]


def test_a_device_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    amd_machine.simulated(tmp_path, 1)
    seen = discover.discover(str(tmp_path))
    seen.devices[0].state = "its node is another's"
    facts = (seen.vendor, seen.root, seen.version, seen.devices)
    monkeypatch.setattr(doctor, "discover", lambda _: Inventory(*facts, ()))
    found = by_check(examined(tmp_path), Status.WARNING)
    assert found["amd-devices"].endswith("(0x84cafeae17e7600) can't be used: its node is another's")

"""Nodes of NVIDIA's driver as nvidia-ctk system knows them: numbers, paths, links."""

from pathlib import Path
from typing import Any

import pytest

from gpuhook.base.errors import DriverError
from gpuhook.nvidia_cli import dev_nodes
from gpuhook.nvidia_cli.dev_nodes import DevNode

Case = dict[str, Any]


@pytest.mark.vectors("system", "system.proc_devices")
def test_majors_from_proc_devices_match_the_vectors(case: Case) -> None:
    text = "\n".join(case["input"]["lines"])
    if case["expected"].get("error"):
        with pytest.raises(DriverError):
            dev_nodes.majors(text)
        return
    assert dev_nodes.majors(text) == case["expected"]["majors"]


@pytest.mark.vectors("system", "system.create_device_nodes")
def test_control_nodes_match_the_vectors(case: Case) -> None:
    root = case["input"]["dev_root"]
    nodes = dev_nodes.control_nodes(case["input"]["majors"])
    expected = [(path, major, minor) for path, major, minor in case["expected"]["mknod"]]
    assert [(root + each.path, each.major, each.minor) for each in nodes] == expected
    said = [dev_nodes.make(each, f"/nowhere{root}", dry_run=True) for each in nodes]
    assert all(path in line for line, (path, _, _) in zip(said, expected, strict=True))


@pytest.mark.vectors("system", "system.load_modules")
def test_module_commands_match_the_vectors(case: Case) -> None:
    assert dev_nodes.module_commands(case["input"]["root"]) == case["expected"]["commands"]


def test_modules_of_another_root_are_loaded_by_chroot() -> None:
    assert dev_nodes.module_commands("/run/nvidia/driver")[0] == [
        "chroot", "/run/nvidia/driver", "/sbin/modprobe", "nvidia"
    ]  # fmt: skip
    assert dev_nodes.module_commands("/")[0] == ["/sbin/modprobe", "nvidia"]


def test_a_module_that_is_not_loaded_is_an_error() -> None:
    with pytest.raises(DriverError, match="nvidia-uvm isn't loaded"):
        dev_nodes.control_nodes({"nvidia": 195})


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A host with two NVIDIA GPUs, one with a MIG device, and with the numbers of a third GPU."""
    devices = tmp_path / "proc/devices"
    devices.parent.mkdir(parents=True)
    devices.write_text(
        "Character devices:\n195 nvidia\n195 nvidiactl\n234 nvidia-caps\n510 nvidia-uvm\n"
    )
    minors = tmp_path / "proc/driver/nvidia-caps/mig-minors"
    minors.parent.mkdir(parents=True)
    minors.write_text("config 1\nmonitor 2\ngpu0/gi0/access 3\ngpu1/gi0/access 99\ngpu2/gi0/x 7\n")
    kinds = [("0x10de", "0x030200"), ("0x10de", "0x030000"), ("0x10de", "0x040300"),
             ("0x1002", "0x030000")]  # fmt: skip
    for number, (vendor, kind) in enumerate(kinds):
        folder = tmp_path / f"sys/bus/pci/devices/0000:0{number}:00.0"
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(f"{vendor}\n")
        (folder / "class").write_text(f"{kind}\n")
    return tmp_path


def test_possible_nodes_include_every_gpu_and_mig_capability(root: Path) -> None:
    assert dev_nodes.possible(str(root)) == [
        DevNode("/dev/nvidiactl", 195, 255),
        DevNode("/dev/nvidia-modeset", 195, 254),
        DevNode("/dev/nvidia-uvm", 510, 0),
        DevNode("/dev/nvidia-uvm-tools", 510, 1),
        DevNode("/dev/nvidia0", 195, 0),
        DevNode("/dev/nvidia1", 195, 1),
        DevNode("/dev/nvidia-caps/nvidia-cap1", 234, 1),
        DevNode("/dev/nvidia-caps/nvidia-cap2", 234, 2),
        DevNode("/dev/nvidia-caps/nvidia-cap3", 234, 3),
        DevNode("/dev/nvidia-caps/nvidia-cap99", 234, 99),
    ]


def test_without_mig_no_capability_nodes_are_listed(root: Path) -> None:
    (root / "proc/driver/nvidia-caps/mig-minors").unlink()
    assert len(dev_nodes.possible(str(root))) == 6


def test_links_are_made_once_and_foreign_ones_reported(tmp_path: Path) -> None:
    node = DevNode(f"{tmp_path}/nvidia0", 195, 0)
    path = tmp_path / "195:0"
    assert dev_nodes.link(str(tmp_path), node, dry_run=True).startswith("would link")
    assert not path.is_symlink()
    assert dev_nodes.link(str(tmp_path), node, dry_run=False).startswith("linked")
    assert path.readlink() == Path(node.path)
    assert dev_nodes.link(str(tmp_path), node, dry_run=False) == ""
    path.unlink()
    path.symlink_to("nvidia0")  # as gpu-py writes it
    assert dev_nodes.link(str(tmp_path), node, dry_run=False) == ""
    path.unlink()
    path.symlink_to("nvidia1")
    assert "doesn't lead to" in dev_nodes.link(str(tmp_path), node, dry_run=False)
    assert path.readlink() == Path("nvidia1")


def test_a_folder_without_device_nodes_has_no_existing_nodes(tmp_path: Path) -> None:
    (tmp_path / "nvidia0").write_text("a file")
    assert [*dev_nodes.existing(str(tmp_path))] == []
    assert [*dev_nodes.existing(f"{tmp_path}/none")] == []

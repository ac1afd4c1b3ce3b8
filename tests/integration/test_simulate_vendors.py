"""A made-up vendor's simulated root, filled by its own code and put in place like NVIDIA's."""

import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import vendors
from gpuhook.base.errors import SimulateError
from gpuhook.tools.cli import cli
from gpuhook_simulate.build import build
from gpuhook_simulate.place import MARKER
from gpuhook_simulate.tree import Tree
from gpuhook_simulate.vendors.nvidia import Options
from gpuhook_simulate.vendors.nvidia import build as build_nvidia

VIDEO, RENDER = 44, 105

ACME = f"""
from gpuhook_simulate.majors import devices_text, free_majors, machines_devices

def simulate(tree, count, settings):
    known = machines_devices()
    majors = free_majors(("acme", "acme-ctl"), known)
    tree.text("proc/devices", devices_text(majors, known), 0o444)
    tree.node("dev/acme-ctl", majors["acme-ctl"], 0, 0o660, gid={RENDER})
    yield f"driver {{settings.get('driver', '1.0')}}"
    for number in range(count):
        tree.node(f"dev/acme{{number}}", majors["acme"], number)
        yield f"acme{{number}}"
"""


@pytest.fixture
def folder(workspace: Path) -> Iterator[Path]:
    """A folder on a file system where device nodes work; gpuhook knows the vendor acme."""
    folder = workspace / "simulate-vendors"
    folder.mkdir()
    try:
        with vendors.known(folder / "packages", "acme", simulate=ACME):
            yield folder
    finally:
        subprocess.run(["rm", "-rf", folder], check=True)


def _simulate(root: Path, *words: str) -> Result:
    return CliRunner().invoke(cli, ["simulate", str(root), *words], catch_exceptions=False)


def test_a_vendors_simulated_root_is_built_and_replaced(folder: Path) -> None:
    root = folder / "root"
    words = ("--vendor=acme", "--gpus=2", "--set=driver=7.1", "--set=x=a=b")
    done = _simulate(root, *words)
    assert done.output.splitlines() == ["driver 7.1", "acme0", "acme1"]
    control, first = (root / "dev/acme-ctl").lstat(), (root / "dev/acme1").lstat()
    assert (control.st_mode, control.st_uid, control.st_gid) == (stat.S_IFCHR | 0o660, 0, RENDER)
    assert (first.st_mode, first.st_uid, first.st_gid) == (stat.S_IFCHR | 0o666, 0, 0)
    majors = (root / "proc/devices").read_text().partition("Block")[0].splitlines()
    assert f"{os.major(first.st_rdev):3d} acme" in majors
    assert os.minor(first.st_rdev) == 1
    assert stat.S_IMODE(root.stat().st_mode) == 0o755
    assert (root / MARKER).is_file()
    assert sorted(path.name for path in folder.iterdir()) == ["packages", "root"]
    assert _simulate(root, "--vendor=acme").output.splitlines() == ["driver 1.0", "acme0"]
    assert not (root / "dev/acme1").exists()
    assert _simulate(root, "--vendor=acme", "--remove").exit_code == 0
    assert not root.exists()


def test_roots_of_different_vendors_replace_each_other(folder: Path) -> None:
    root = folder / "root"
    build_nvidia(Options(root=str(root)))
    _simulate(root, "--vendor=acme", "--gpus=1")
    assert sorted(path.name for path in (root / "dev").iterdir()) == ["acme-ctl", "acme0"]
    build_nvidia(Options(root=str(root)))
    assert (root / "dev/nvidiactl").exists()
    assert not (root / "dev/acme0").exists()
    _simulate(root, "--remove")
    assert not root.exists()


def test_a_simulated_node_does_not_inherit_its_folders_group(folder: Path) -> None:
    """In a folder that passes its group on, a node gets the requested group."""
    tree = Tree(str(folder / "tree"))
    tree.folder("dev", 0o2755)
    os.chown(folder / "tree/dev", 0, VIDEO)
    tree.node("dev/a", 1, 3)
    tree.node("dev/b", 1, 3, gid=RENDER)
    assert [(folder / "tree/dev" / name).stat().st_gid for name in "ab"] == [0, RENDER]


def test_a_simulator_that_fails_changes_nothing(folder: Path) -> None:
    root = folder / "root"
    _simulate(root, "--vendor=acme")

    def fill(tree: Tree) -> None:
        tree.text("etc/half", "")
        raise SimulateError("No", "Try again")

    with pytest.raises(SimulateError, match="No"):
        build(str(root), fill)
    assert (root / "dev/acme0").exists()
    with pytest.raises(SimulateError, match="No"):
        build(str(folder / "other"), fill)
    assert sorted(path.name for path in folder.iterdir()) == ["packages", "root"]


def test_a_vendor_root_in_an_unrelated_folder_is_refused(folder: Path) -> None:
    other = folder / "other"
    other.mkdir()
    (other / "precious").touch()
    with pytest.raises(SimulateError, match="not empty and isn't a simulated driver root"):
        _simulate(other, "--vendor=acme")
    assert [path.name for path in other.iterdir()] == ["precious"]

import json
import os
from pathlib import Path

import pytest

from gpuhook.base.oci.spec import Spec
from gpuhook.core import dev_char
from gpuhook.core.inventory.model import DeviceNode

NULL = DeviceNode("/dev/null", 1, 3)
ZERO = DeviceNode("/dev/zero", 1, 5)


@pytest.fixture
def dev(tmp_path: Path) -> Path:
    """A /dev whose null and zero are ordinary files, because only root may create nodes."""
    (tmp_path / "char").mkdir()
    (tmp_path / "null").touch()
    (tmp_path / "zero").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("system.slice:docker:0123", True),
        (":cri-containerd:0123", True),
        ("/docker/0123", False),
        ("", False),
        (None, False),
        (["a:b:c"], False),
    ],
)
def test_a_cgroups_path_is_recognized_as_a_systemd_scope(path: object, expected: bool) -> None:
    text = json.dumps({"linux": {"cgroupsPath": path}})
    assert Spec("/b/config.json", text).is_in_scope is expected
    assert not Spec("/b/config.json", "{}").is_in_scope


def test_missing_dev_char_links_are_made_once(dev: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.lstat

    def lstat(path: str) -> os.stat_result:
        name = os.path.basename(path)
        return real(f"/dev/{name}") if name in ("null", "zero") else real(path)

    monkeypatch.setattr(os, "lstat", lstat)
    (dev / "char/1:5").symlink_to("../zero")
    assert dev_char.make_links([NULL, ZERO], dev=str(dev)) == ["1:3"]
    assert (dev / "char/1:3").readlink() == Path("../null")
    assert dev_char.make_links([NULL, ZERO], dev=str(dev)) == []


def test_simulated_nodes_get_no_dev_char_link(dev: Path) -> None:
    simulated = DeviceNode("/dev/nvidia0", 195, 0)
    assert dev_char.make_links([simulated], "/nowhere", str(dev)) == []
    (dev / "nvidia0").touch()
    assert dev_char.make_links([simulated], "/nowhere", str(dev)) == []
    assert list((dev / "char").iterdir()) == []


def test_a_node_in_a_driver_root_gets_a_dev_char_link_there(
    dev: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The node of a driver container doesn't exist in the host's /dev."""
    root = tmp_path_factory.mktemp("driver")
    (root / "dev").symlink_to("/dev")
    assert dev_char.make_links([NULL], str(root), str(dev)) == ["1:3"]
    assert (dev / "char/1:3").readlink() == root / "dev/null"
    assert dev_char.make_links([NULL], str(root), str(dev)) == []


def test_a_dangling_dev_char_link_is_replaced(dev: Path) -> None:
    (dev / "char/1:3").symlink_to("/gone/dev/null")
    assert dev_char.make_links([NULL], "/", str(dev)) == ["1:3"]
    assert (dev / "char/1:3").readlink() == Path("/dev/null")


def test_without_dev_char_no_link_is_made(tmp_path: Path) -> None:
    assert dev_char.make_links([NULL], dev=str(tmp_path)) == []
    assert list(tmp_path.iterdir()) == []

"""Driver roots, and PCI devices by the driver that is bound to them."""

from pathlib import Path

import pytest

from gpuhook.ground.container.rootfs import Rootfs
from gpuhook.start.inventory.model import Node
from gpuhook.vendors import bound


@pytest.mark.parametrize("name", ["0000:c1:00.0", "10000:e1:00.7", "ABCD:00:1f.3"])
def test_addresses(name: str) -> None:
    assert bound.is_address(name)


@pytest.mark.parametrize(
    "name", ["bind", "c1:00.0", "0000:c1:00", "0000:c1:00.", "0:g:0.0", "::.", "a.b.c.d"]
)
def test_other_names(name: str) -> None:
    assert not bound.is_address(name)


def test_devices_of_a_driver(tmp_path: Path) -> None:
    folder = tmp_path / "sys/bus/pci/drivers/xe"
    for name in ("0000:03:00.0", "module", "0000:02:00.0"):
        (folder / name).mkdir(parents=True)
    (folder / "bind").touch()
    with Rootfs(str(tmp_path)) as root:
        found = bound.devices(root, "xe")
        assert bound.devices(root, "other") == []
    assert [path.rpartition("/")[2] for path in found] == ["0000:02:00.0", "0000:03:00.0"]
    assert all(path.startswith("/sys/bus/pci/drivers/xe/") for path in found)


@pytest.mark.parametrize(
    ("name", "number"),
    [("card12", 12), ("card0", 0), ("card", None), ("card1-DP-1", None), ("xcard1", None),
     ("card٣", None), ("card1234567890", None), ("card01", None), ("card_1", None)],
)  # fmt: skip
def test_numbers(name: str, number: int | None) -> None:
    assert bound.number(name, "card") == number


def test_names_with_numbers_are_sorted_by_these(tmp_path: Path) -> None:
    for name in ("card10", "card9", "card1", "renderD128", "card"):
        (tmp_path / "drm" / name).mkdir(parents=True)
    with Rootfs(str(tmp_path)) as root:
        assert bound.numbered(root, "/drm", "card") == [1, 9, 10]
        assert bound.numbered(root, "/drm", "renderD") == [128]
        assert bound.numbered(root, "/nothing", "card") == []


def test_texts(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text(" 0x8086\n")
    (tmp_path / "large").write_bytes(bytes(1 << 17))
    (tmp_path / "folder").mkdir()
    (tmp_path / "away").symlink_to("/../../nowhere")
    with Rootfs(str(tmp_path)) as root:
        assert bound.text(root, "/plain") == "0x8086"
        for name in ("large", "folder", "away", "none"):
            assert bound.text(root, f"/{name}") == ""


def test_numbers_of_a_node() -> None:
    node = Node("/dev/dri/card0", 226, 0)
    assert bound.wrong_numbers(node, "226:0") == ""
    assert bound.wrong_numbers(node, "") == ""
    assert bound.wrong_numbers(None, "226:0") == ""
    assert bound.wrong_numbers(node, "226:1") == (
        "/dev/dri/card0 has the numbers 226:0, and its driver's are 226:1"
    )

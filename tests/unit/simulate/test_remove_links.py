"""simulate --remove, which leaves no link to a simulated node."""

import os
from pathlib import Path

import pytest

from gpuhook_simulate.place import MARKER, remove


@pytest.mark.parametrize("way", ["gpus", "named"])
def test_links_to_simulated_nodes_are_removed_and_others_kept(tmp_path: Path, way: str) -> None:
    root, links = tmp_path / "gpus", tmp_path / "char"
    (root / "dev").mkdir(parents=True)
    (root / MARKER).touch()
    (tmp_path / "named").symlink_to("gpus")
    links.mkdir()
    targets = {
        "195:0": f"{tmp_path}/{way}/dev/nvidia0",
        "195:255": f"{root}/dev/nvidiactl",
        "1:3": "../null",
        "195:1": f"{tmp_path}/gpus-of-others/dev/nvidia1",
    }
    for name, target in targets.items():
        (links / name).symlink_to(target)
    (links / "file").touch()
    remove(str(tmp_path / way), str(links))
    assert not root.exists()
    assert sorted(os.listdir(links)) == ["195:1", "1:3", "file"]


def test_removal_without_links_succeeds(tmp_path: Path) -> None:
    root = tmp_path / "gpus"
    root.mkdir()
    (root / MARKER).touch()
    remove(str(root), str(tmp_path / "absent"))
    assert not root.exists()

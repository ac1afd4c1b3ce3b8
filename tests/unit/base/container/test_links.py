"""Links next to libraries, as NVIDIA's hook create-symlinks makes them."""

import os
from pathlib import Path
from typing import Any

import pytest

from gpuhook.base.container.changes import ContainerRootfs, Journal
from gpuhook.core.plan.operations import Symlink

Case = dict[str, Any]


def lay_out(root: Path, entries: dict[str, str]) -> None:
    """Create links and folders; the value "dir" stands for a folder."""
    for path, what in entries.items():
        place = root / path.strip("/")
        (place if what == "dir" else place.parent).mkdir(parents=True, exist_ok=True)
        if what != "dir":
            place.symlink_to(what)


def links(root: Path) -> dict[str, str]:
    every = (path for path in root.rglob("*") if path.is_symlink())
    return {f"/{path.relative_to(root)}": os.readlink(path) for path in every}


def make(root: Path, link: str, target: str) -> bool:
    """Make a link in the root of a container; tell whether anything was changed."""
    before = {path: path.lstat().st_ino for path in root.rglob("*")}
    fd = os.open(root, os.O_PATH | os.O_DIRECTORY)
    with ContainerRootfs(fd, str(root), Journal()) as container:
        Symlink(link, target, replace=True, reason="").execute(container)
    return before != {path: path.lstat().st_ino for path in root.rglob("*")}


@pytest.mark.vectors("create_symlinks", "create_symlinks")
def test_links_are_created_inside_the_container_root(case: Case, tmp_path: Path) -> None:
    root = tmp_path / "root"
    lay_out(root, case["input"]["container_links"])
    make(root, case["input"]["link"], case["input"]["target"])
    assert links(root) == case["expected"]["links_relative_to_root"]
    assert (os.listdir(tmp_path) != ["root"]) is case["expected"]["escape"]


@pytest.mark.vectors("create_symlinks", "create_symlinks.exists")
def test_an_existing_link_is_unchanged(case: Case, tmp_path: Path) -> None:
    lay_out(tmp_path, case["input"]["links"])
    link, target = case["input"]["link"], case["input"]["target"]
    assert make(tmp_path, link, target) is not case["expected"]["exists"]
    assert links(tmp_path)[link] == target

"""The empty files to mount on: names of one file, each made and removed with care."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuhook.ground.container import kernel
from gpuhook.ground.container.changes import Container, Journal

FOLDER = "/usr/lib"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root/usr/lib").mkdir(parents=True)
    return tmp_path / "root"


@pytest.fixture
def container(root: Path) -> Iterator[Container]:
    fd = os.open(root, os.O_PATH | os.O_DIRECTORY)
    with Container(fd, str(root), Journal()) as found:
        yield found


def make(container: Container, *names: str) -> None:
    for name in names:
        fd = container.mount_point(f"{FOLDER}/{name}")
        assert fd is not None
        os.close(fd)


def inodes(root: Path) -> dict[str, int]:
    return {path.name: path.stat().st_ino for path in (root / FOLDER[1:]).iterdir()}


def test_one_file_has_all_the_names(container: Container, root: Path) -> None:
    make(container, "a", "b")
    other = container.mount_point("/usr/bin/c")
    assert other is not None
    assert os.fstat(other).st_ino == inodes(root)["a"] == inodes(root)["b"]
    os.close(other)
    assert (root / "usr/lib/b").read_bytes() == b""


def test_the_images_own_files_are_used_as_they_are(container: Container, root: Path) -> None:
    (root / "usr/lib/b").write_text("the image's")
    (root / "usr/lib/c").symlink_to("b")
    make(container, "a", "b", "c", "d")
    assert (root / "usr/lib/b").read_text() == "the image's"
    assert os.readlink(root / "usr/lib/c") == "b"
    assert inodes(root)["a"] == inodes(root)["d"] != inodes(root)["b"]
    assert container.journal.roll_back() == []
    assert sorted(inodes(root)) == ["b", "c"]


def test_one_that_was_removed_meanwhile_is_made_anew(container: Container, root: Path) -> None:
    make(container, "a")
    (root / "usr/lib/a").unlink()
    make(container, "b", "c")
    assert inodes(root)["b"] == inodes(root)["c"]


def test_filesystems_without_further_names(
    container: Container, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(kernel, "link_file", refuse)
    make(container, "a", "b")
    assert len(set(inodes(root).values())) == 2


def test_one_that_is_swapped_for_another_file_is_refused(
    container: Container, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The descriptor to mount on must be of the file that was made, whatever has its name."""
    link = kernel.link_file

    def link_and_swap(fd: int, parent: int, name: str) -> None:
        link(fd, parent, name)
        (root / "usr/lib" / name).unlink()
        (root / "usr/lib" / name).symlink_to("/etc/passwd")

    make(container, "a")
    monkeypatch.setattr(kernel, "link_file", link_and_swap)
    with pytest.raises(OSError, match="replaced") as caught:
        container.mount_point(f"{FOLDER}/b")
    assert caught.value.errno == errno.EBUSY
    assert container.journal.roll_back() == []
    assert os.listdir(root / FOLDER[1:]) == ["b"], "what another one made is left"

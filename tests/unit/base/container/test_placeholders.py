"""Empty files as mount points: each is a separate file, which is created and removed safely."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuhook.base.container import kernel
from gpuhook.base.container.changes import ContainerRootfs, Journal

FOLDER = "/usr/lib"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root/usr/lib").mkdir(parents=True)
    return tmp_path / "root"


@pytest.fixture
def container(root: Path) -> Iterator[ContainerRootfs]:
    fd = os.open(root, os.O_PATH | os.O_DIRECTORY)
    with ContainerRootfs(fd, str(root), Journal()) as found:
        yield found


def make(container: ContainerRootfs, *names: str) -> None:
    for name in names:
        fd = container.mount_point(f"{FOLDER}/{name}")
        assert fd is not None
        os.close(fd)


def inodes(root: Path) -> dict[str, int]:
    return {path.name: path.stat().st_ino for path in (root / FOLDER[1:]).iterdir()}


def test_each_placeholder_is_a_separate_file(container: ContainerRootfs, root: Path) -> None:
    """Once a container runs without devices, its programs can use them as ordinary files."""
    names = [f"lib{number}.so" for number in range(46)]
    make(container, *names)
    made = [root / FOLDER[1:] / name for name in names]
    assert [path.stat().st_nlink for path in made] == [1] * len(names)
    for path in made:
        path.write_text(path.name)
    assert [path.read_text() for path in made] == names


def test_existing_files_of_the_image_are_used_unchanged(
    container: ContainerRootfs, root: Path
) -> None:
    (root / "usr/lib/b").write_text("the image's")
    (root / "usr/lib/c").symlink_to("b")
    make(container, "a", "b", "c", "d")
    assert (root / "usr/lib/b").read_text() == "the image's"
    assert os.readlink(root / "usr/lib/c") == "b"
    assert len({*inodes(root).values()}) == len(("a", "b", "d"))
    assert container.journal.roll_back() == []
    assert sorted(inodes(root)) == ["b", "c"]


def test_a_removed_placeholder_is_made_again(container: ContainerRootfs, root: Path) -> None:
    make(container, "a")
    (root / "usr/lib/a").unlink()
    make(container, "b", "a")
    assert sorted(inodes(root)) == ["a", "b"]


def test_a_placeholder_swapped_for_a_link_is_not_mounted_on(
    container: ContainerRootfs, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The returned descriptor refers to the created file, whatever has the file's name by then."""
    create = kernel.create_file
    made: list[int] = []

    def create_and_swap(parent: int, name: str, mode: int) -> int:
        fd = create(parent, name, mode)
        made.append(os.fstat(fd).st_ino)
        (root / "usr/lib" / name).unlink()
        (root / "usr/lib" / name).symlink_to("/etc/passwd")
        return fd

    monkeypatch.setattr(kernel, "create_file", create_and_swap)
    fd = container.mount_point(f"{FOLDER}/b")
    assert fd is not None
    assert [os.fstat(fd).st_ino] == made
    os.close(fd)
    assert container.journal.roll_back() == []
    assert os.listdir(root / FOLDER[1:]) == ["b"], "what another one made is left"

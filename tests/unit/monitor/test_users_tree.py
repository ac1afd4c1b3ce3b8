"""A user's folder that root removes, without leaving the folder or taking time without limit."""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuhook.monitor.host import users_tree
from gpuhook.monitor.host.users_tree import BIN, TrashFolder

LATER = 60.0  # seconds


@pytest.fixture
def parent(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield fd
    os.close(fd)


def remove(parent: int, name: str, seconds: float = LATER) -> None:
    made = TrashFolder(parent)
    try:
        made.take(name, time.monotonic() + seconds)
        made.remove_taken(time.monotonic() + seconds)
    finally:
        made.close()


def fill(folder: Path, outside: Path) -> None:
    """Put a file of each kind into a folder."""
    (folder / "folder/in it").mkdir(parents=True)
    (folder / "file").write_text("text")
    (folder / "folder/file").touch(mode=0)
    (folder / "to file").symlink_to(outside / "file")
    (folder / "to folder").symlink_to(outside)
    (folder / "dead link").symlink_to("/nonexistent/x")
    os.link(outside / "file", folder / "other name")
    os.mkfifo(folder / "pipe")
    before = Path.cwd()
    os.chdir(folder)
    with socket.socket(socket.AF_UNIX) as made:
        made.bind("socket")
    os.chdir(before)


def test_files_of_all_kinds_are_removed_and_outside_ones_kept(tmp_path: Path, parent: int) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("kept")
    (tmp_path / "his").mkdir()
    fill(tmp_path / "his", outside)
    remove(parent, "his")
    assert sorted(os.listdir(tmp_path)) == [BIN, "outside"]
    assert os.listdir(tmp_path / BIN) == []
    assert (outside / "file").read_text() == "kept"
    assert (tmp_path / BIN).stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("kind", ["link", "file", "pipe"])
def test_a_link_file_or_pipe_is_removed_but_not_its_target(
    tmp_path: Path, parent: int, kind: str
) -> None:
    (tmp_path / "kept").mkdir()
    if kind == "link":
        (tmp_path / "his").symlink_to("kept")
    elif kind == "file":
        (tmp_path / "his").touch()
    else:
        os.mkfifo(tmp_path / "his")
    remove(parent, "his")
    assert sorted(os.listdir(tmp_path)) == [BIN, "kept"]


def test_very_deeply_nested_folders_are_removed(tmp_path: Path, parent: int) -> None:
    """The path has 12,000 letters, which no call accepts, and is deeper than Python's recursion."""
    fd = os.open(tmp_path, os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("deep", dir_fd=fd)
        below = os.open("deep", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)
    remove(parent, "deep")
    assert os.listdir(tmp_path / BIN) == []


def test_a_removal_that_times_out_is_finished_by_a_later_one(tmp_path: Path, parent: int) -> None:
    (tmp_path / "his/below").mkdir(parents=True)
    with pytest.raises(TimeoutError):
        remove(parent, "his", 0.0)
    assert os.listdir(tmp_path) == [BIN]
    assert len(os.listdir(tmp_path / BIN)) == 1
    other = TrashFolder(parent)
    other.remove_others(time.monotonic() + LATER)
    other.close()
    assert os.listdir(tmp_path / BIN) == []


def test_a_process_creating_files_does_not_delay_the_removal(tmp_path: Path, parent: int) -> None:
    """The process has the folder open, so it can make files in it without a path."""
    (tmp_path / "his/below").mkdir(parents=True)
    fd = os.open(tmp_path / "his/below", os.O_RDONLY)
    over, made = threading.Event(), list[int]()

    def make() -> None:
        with contextlib.suppress(FileNotFoundError):  # the folder is removed at the end
            while not over.is_set():
                os.close(os.open(f"{len(made)}", os.O_CREAT | os.O_WRONLY, dir_fd=fd))
                made.append(1)

    maker = threading.Thread(target=make)
    maker.start()
    try:
        while len(made) < 10:
            time.sleep(0.001)
        before = time.monotonic()
        with contextlib.suppress(OSError):
            remove(parent, "his", 1.0)
        assert time.monotonic() - before < LATER
        assert not (tmp_path / "his").exists()
    finally:
        over.set()
        maker.join()
        os.close(fd)
    other = TrashFolder(parent)
    other.remove_others(time.monotonic() + LATER)
    other.close()
    assert os.listdir(tmp_path / BIN) == []


def test_remove_taken_leaves_entries_of_another_bin(tmp_path: Path, parent: int) -> None:
    one, other = TrashFolder(parent), TrashFolder(parent)
    for made, name in ((one, "a"), (other, "b")):
        (tmp_path / name / "below").mkdir(parents=True)
        made.take(name, time.monotonic() + LATER)
    one.remove_taken(time.monotonic() + LATER)
    assert len(os.listdir(tmp_path / BIN)) == 1
    one.remove_others(time.monotonic() + LATER)
    assert os.listdir(tmp_path / BIN) == []
    one.close()
    other.close()


def test_removing_a_missing_name_is_an_error(parent: int) -> None:
    with pytest.raises(FileNotFoundError):
        remove(parent, "nothing")


@pytest.mark.parametrize("kind", ["link", "file", "open"])
def test_an_untrusted_bin_folder_is_refused(tmp_path: Path, parent: int, kind: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    place = tmp_path / BIN
    if kind == "link":
        place.symlink_to("elsewhere")
    elif kind == "file":
        place.touch()
    else:
        place.mkdir()
        place.chmod(0o777)
    with pytest.raises(OSError):
        TrashFolder(parent)
    assert os.listdir(tmp_path / "elsewhere") == []


@pytest.mark.parametrize("kind", ["link", "file", "pipe"])
def test_only_a_real_folder_is_opened(tmp_path: Path, parent: int, kind: str) -> None:
    (tmp_path / "it").mkdir()
    os.close(users_tree.open_folder(parent, "it"))
    place = tmp_path / "other"
    if kind == "link":
        place.symlink_to("it")
    elif kind == "file":
        place.touch()
    else:
        os.mkfifo(place)
    with pytest.raises(OSError):
        users_tree.open_folder(parent, "other")

"""The state directory: files that other users may have written are never used, and none is torn."""

import errno
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpuhook.base import state_directory
from gpuhook.base.errors import HeldError
from gpuhook.base.host import lock
from gpuhook.base.state_directory import StateDirectory, boot_id
from gpuhook.core.records import leases

ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can change an owner")
OTHER = 1000  # a user


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[StateDirectory]:
    made = StateDirectory.make(str(tmp_path / "state"))
    assert made is not None
    with made:
        yield made


def place(folder: StateDirectory, *names: str) -> Path:
    return Path(folder.path, *names)


# Folders ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("umask", [0, 0o077])
def test_modes_do_not_depend_on_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        for name, private, mode in (("open", False, 0o755), ("own", True, 0o700)):
            made = StateDirectory.make(str(tmp_path / "above" / name), private=private)
            assert made is not None
            with made, made.folder("below", make=True, private=True):
                assert place(made).stat().st_mode & 0o777 == mode
                assert place(made, "below").stat().st_mode & 0o077 == 0
    finally:
        os.umask(before)


def _writable(path: Path) -> None:
    path.chmod(path.stat().st_mode | 0o020)


def _owned_by_another(path: Path) -> None:
    os.chown(path, OTHER, OTHER)


def _link(path: Path) -> None:
    aside = path.with_name("aside")
    path.rename(aside)
    path.symlink_to(aside)


def _file(path: Path) -> None:
    path.rmdir()
    path.touch()


SPOILED_FOLDERS = [_writable, pytest.param(_owned_by_another, marks=ROOT), _link, _file]


@pytest.mark.protects(
    "saved-owner", "a state folder that other users can write to isn't used", instead="return True",
    only="_writable or _owned",
)  # fmt: skip
@pytest.mark.parametrize("spoil", SPOILED_FOLDERS)
def test_a_folder_that_other_users_can_change_is_refused(
    folder: StateDirectory, spoil: Callable[[Path], None]
) -> None:
    folder.folder("below", make=True).close()
    spoil(place(folder, "below"))
    for make in (False, True):
        with pytest.raises(OSError, match=r"."):
            folder.folder("below", make=make)
    folder.close()
    if spoil is _file:
        place(folder, "below").unlink()
    spoil(place(folder))
    assert StateDirectory.open(folder.path) is None
    assert StateDirectory.make(folder.path) is None
    with pytest.raises(OSError, match=r"."):
        StateDirectory.opened(folder.path)


def test_a_private_folder_that_others_can_read_is_refused(folder: StateDirectory) -> None:
    folder.folder("below", make=True).close()
    place(folder, "below").chmod(0o750)
    folder.folder("below").close()
    with pytest.raises(PermissionError, match="others can use it"):
        folder.folder("below", private=True)


def test_a_refused_folder_is_not_left_open(folder: StateDirectory) -> None:
    _writable(place(folder))
    before = os.listdir("/proc/self/fd")
    assert StateDirectory.open(folder.path) is None
    assert os.listdir("/proc/self/fd") == before


def test_missing_and_blocked_directories_are_not_opened(folder: StateDirectory) -> None:
    place(folder, "file").touch()
    assert StateDirectory.make(f"{folder.path}/file/state") is None
    assert StateDirectory.open(f"{folder.path}/missing") is None
    with pytest.raises(FileNotFoundError):
        folder.folder("missing")


def test_a_replaced_path_does_not_redirect_an_open_folder(folder: StateDirectory) -> None:
    """Every access goes through the descriptor."""
    folder.replace("a", b"1")
    _link(place(folder))
    place(folder).unlink()
    place(folder).mkdir()
    folder.replace("a", b"[2]")
    assert folder.load("a") == [2]
    assert os.listdir(folder.path) == []


# Files --------------------------------------------------------------------------------------------


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _changed(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"value", b"other"))


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _binary(path: Path) -> None:
    path.write_bytes(b"\xff\0")


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


SPOILED_FILES = [
    _cut, _empty, _binary, _writable, pytest.param(_owned_by_another, marks=ROOT), _pipe, _folder,
    _link,
]  # fmt: skip


@pytest.mark.parametrize("spoil", [*SPOILED_FILES, _changed])
def test_a_corrupt_checked_file_counts_as_missing(
    folder: StateDirectory, spoil: Callable[[Path], None]
) -> None:
    folder.write_checked("a", b'{"key": "value"}')
    whole = folder.read_checked("a")
    assert whole is not None
    assert whole[0] == '{"key": "value"}'
    spoil(place(folder, "a"))
    assert folder.read_checked("a") is None


@pytest.mark.parametrize("spoil", SPOILED_FILES)
def test_a_corrupt_json_file_is_an_error(
    folder: StateDirectory, spoil: Callable[[Path], None]
) -> None:
    folder.replace("a", b'{"key": "value"}')
    assert folder.load("a") == {"key": "value"}
    spoil(place(folder, "a"))
    with pytest.raises((ValueError, OSError)) as caught:
        folder.load("a")
    assert isinstance(caught.value, ValueError) != (spoil is _link)


def test_a_file_is_read_up_to_a_limit(folder: StateDirectory) -> None:
    folder.replace("a", b'"' + b"x" * 100 + b'"')
    assert len(folder.load("a", 102)) == 100
    with pytest.raises(ValueError, match="a"):
        folder.load("a", 101)
    with pytest.raises(FileNotFoundError):
        folder.read("missing")


@pytest.mark.parametrize("lasting", [False, True])
def test_a_failed_write_changes_nothing(
    folder: StateDirectory, lasting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.replace("a", b"before", 0o640, lasting=lasting)
    assert place(folder, "a").stat().st_mode & 0o777 == 0o640

    def fail(*_: object) -> int:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as full:
        full.setattr(os, "write", fail)
        with pytest.raises(OSError, match="full"):
            folder.replace("a", b"after", lasting=lasting)
    assert folder.read("a") == b"before"
    assert folder.names() == ["a"]


def test_a_temporary_file_of_a_killed_writer_is_replaced(folder: StateDirectory) -> None:
    place(folder, ".a").write_bytes(b"half")
    folder.replace("a", b"whole")
    assert folder.names() == ["a"]
    folder.remove("a")
    folder.remove("a")
    assert folder.names() == []


def _write_often(path: str, number: int) -> None:
    body = str(number).encode() * 100_000
    with StateDirectory.opened(path) as folder:
        for _ in range(50):
            try:
                folder.write_checked("a", body)
            except FileNotFoundError:
                pass  # another writer has renamed or replaced the temporary file


def test_concurrent_writers_leave_a_whole_file_or_none(folder: StateDirectory) -> None:
    """Without a lock a reader gets one writer's content, and never a mixture."""
    writers = [
        multiprocessing.get_context("fork").Process(target=_write_often, args=(folder.path, each))
        for each in (1, 2, 3)
    ]
    for each in writers:
        each.start()
    seen = set()
    try:
        while any(each.is_alive() for each in writers):
            whole = folder.read_checked("a")
            if whole is not None:
                seen.add(whole[0])
    finally:
        for each in writers:
            each.join()
    assert seen <= {str(each) * 100_000 for each in (1, 2, 3)}
    folder.write_checked("a", b"last")
    whole = folder.read_checked("a")
    assert whole is not None
    assert whole[0] == "last"


# Locks --------------------------------------------------------------------------------------------


def _count(path: str) -> None:
    with StateDirectory.opened(path) as folder:
        for _ in range(50):
            with folder.lock("lock", 60.0):
                folder.replace("count", str(int(folder.read("count")) + 1).encode())


def test_concurrent_writers_take_turns_with_the_lock(folder: StateDirectory) -> None:
    folder.replace("count", b"0")
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_count, args=(folder.path,)) for _ in range(4)]
    for each in writers:
        each.start()
    for each in writers:
        each.join()
    assert [each.exitcode for each in writers] == [0] * 4
    assert folder.read("count") == b"200"


HOLD = """
import os, sys, time
sys.path.append(sys.argv[1])
from gpuhook.base.state_directory import StateDirectory
held = StateDirectory.opened(sys.argv[2]).lock("lock", for_life=sys.argv[3] == "for_life")
print("held", flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("kind", ["for_life", "block"])
def test_a_lock_held_by_another_process_times_out(folder: StateDirectory, kind: str) -> None:
    sources = str(Path(state_directory.__file__).parents[2])
    words = [sys.executable, "-c", HOLD, sources, folder.path, kind]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout is not None
            other.stdout.readline()
            before = os.listdir("/proc/self/fd")
            with pytest.raises(TimeoutError, match="another process"):
                folder.lock("lock", 0.05, for_life=kind == "for_life")
            assert os.listdir("/proc/self/fd") == before
        finally:
            other.kill()
            other.wait()
    folder.lock("lock", for_life=kind == "for_life").close()


def test_a_removed_lock_file_is_not_used_as_a_lock(
    folder: StateDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock on a removed file excludes no process, so the new file is locked."""
    take, taken = lock.take, list[int]()

    def look(fd: int, seconds: float = 0.0) -> bool:
        if not taken:
            os.unlink("lock", dir_fd=folder.fd)
        taken.append(fd)
        return take(fd, seconds)

    monkeypatch.setattr(lock, "take", look)
    with folder.lock("lock", 60.0) as held:
        assert len(taken) == 2
        assert os.path.samestat(os.fstat(held.fd), place(folder, "lock").stat())
    taken.clear()
    with pytest.raises(TimeoutError):
        folder.lock("lock")


@pytest.mark.parametrize("what", [_link, _folder, _pipe])
def test_a_lock_path_that_is_no_regular_file_never_blocks(
    folder: StateDirectory, what: Callable[[Path], None]
) -> None:
    """Opening a pipe must not wait for its other end, and no link is followed."""
    folder.replace("lock", b"")
    what(place(folder, "lock"))
    began = time.monotonic()
    try:
        folder.lock("lock", 60.0).close()
    except OSError:
        assert what is not _pipe
    assert time.monotonic() - began < 60.0


# Boots --------------------------------------------------------------------------------------------


def test_the_boot_id_is_read_from_the_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert boot_id() == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    other = tmp_path / "boot_id"
    other.write_text("another\n")
    monkeypatch.setattr(state_directory, "BOOT_ID", str(other))
    assert boot_id() == "another"
    other.unlink()
    with pytest.raises(FileNotFoundError):
        boot_id()


def test_a_record_of_another_boot_holds_no_device() -> None:
    held = {
        "given": [{"kind": "k", "selected": ["a"], "nodes": {"a": []}}], "boot": "another",
        "id": "x", "pid": 1, "engine": "", "namespace": "", "pod": "", "container": "",
    }  # fmt: skip
    leases.refuse({**held, "boot": boot_id()}, [held], ("k",))
    with pytest.raises(HeldError):
        leases.refuse(held, [{**held, "boot": boot_id()}], ("k",))

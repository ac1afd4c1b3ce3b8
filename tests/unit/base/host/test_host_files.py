"""Files that any user may have created: read without waiting, and whole or not at all."""

import errno
import os
import socket
import stat
import struct
from pathlib import Path

import pytest
from timeouts import in_time

from gpuhook.base.errors import UntrustedPathError
from gpuhook.base.host import files as host_files


def _make(path: Path, kind: str) -> None:
    """Create something other than a regular file at a path."""
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "link to a pipe":
        os.mkfifo(path.with_name("target"))
        path.symlink_to("target")
    elif kind == "link to a device":
        path.symlink_to("/dev/zero")
    else:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))


@pytest.mark.protects(
    "no-waiting-open",
    "other users: opening a path never waits for a pipe",
    instead="_READ = os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC",
)
@pytest.mark.protects(
    "regular-read", "other users: a path that isn't a regular file isn't read", instead="if True:"
)
@pytest.mark.parametrize("kind", ["pipe", "folder", "link to a pipe", "link to a device", "socket"])
def test_a_path_that_is_no_regular_file_is_refused_without_waiting(
    tmp_path: Path, kind: str
) -> None:
    _make(tmp_path / "file", kind)
    with in_time(), pytest.raises(OSError) as caught:
        host_files.read(str(tmp_path / "file"))
    assert caught.value.errno in (errno.EINVAL, errno.ENXIO)


def test_a_name_with_a_null_byte_is_an_os_error() -> None:
    with pytest.raises(OSError, match="null"):
        host_files.read("/etc/\0")


@pytest.mark.protects(
    "bounded-read",
    "other users: a file is read only up to a size limit",
    instead="while piece := os.read(fd, _PIECE):",
)
def test_a_file_is_read_up_to_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 200_000)
    assert len(host_files.read(str(path), 200_000)) == 200_000
    assert host_files.read_start(str(path), 70_000) == b"x" * 70_000
    with pytest.raises(OSError, match="larger than 199999 bytes") as caught:
        host_files.read(str(path), 199_999)
    assert caught.value.errno == errno.EFBIG


def test_a_file_without_a_size_is_read_too() -> None:
    assert host_files.read("/proc/self/stat").startswith(str(os.getpid()).encode())


def test_a_private_file_is_made_or_emptied(tmp_path: Path) -> None:
    path = tmp_path / "report"
    for _ in range(2):
        fd = host_files.create_private(str(path))
        assert os.fstat(fd).st_size == 0
        os.write(fd, b"secret")
        os.close(fd)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        path.chmod(0o644)
    assert path.read_text() == "secret"


# Tag, permissions and id of each entry: acl(5), linux/posix_acl_xattr.h.
LIST = (2).to_bytes(4, "little") + b"".join(
    struct.pack("<HHI", *entry)
    for entry in (
        (0x01, 6, 0xFFFFFFFF), (0x02, 4, 65533), (0x04, 0, 0xFFFFFFFF),  # owner, a user, group
        (0x10, 4, 0xFFFFFFFF), (0x20, 0, 0xFFFFFFFF),  # mask, others
    )
)  # fmt: skip
ACCESS, DEFAULT = "system.posix_acl_access", "system.posix_acl_default"


def _set(path: Path, name: str) -> None:
    try:
        os.setxattr(path, name, LIST)
    except OSError as error:
        if error.errno != errno.ENOTSUP:
            raise
        pytest.skip("this filesystem has no access control lists")


@pytest.mark.protects("access-list", "other users: a replaced file keeps its access control list")
def test_a_replaced_file_keeps_its_access_control_list(tmp_path: Path) -> None:
    """Without the list, its mask in the mode's group bits would become the group's permissions."""
    path = tmp_path / "file"
    path.write_text("old")
    _set(path, ACCESS)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    host_files.replace(str(path), b"new")
    assert (path.read_text(), os.getxattr(path, ACCESS)) == ("new", LIST)


def test_a_replaced_file_inherits_no_access_control_list(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    path.chmod(0o640)
    _set(tmp_path, DEFAULT)
    host_files.replace(str(path), b"new")
    assert path.read_text() == "new"
    assert os.listxattr(path) == []


def test_a_given_mode_removes_the_access_control_list(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    _set(path, ACCESS)
    host_files.replace(str(path), b"new", 0o600)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listxattr(path) == []


@pytest.mark.protects(
    "no-link-followed",
    "other users: a report is not written through a link",
    instead="_NEW = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC",
)
@pytest.mark.parametrize("kind", ["pipe", "link", "hard link", "folder"])
def test_a_private_file_is_not_written_through_an_existing_entry(tmp_path: Path, kind: str) -> None:
    path, other = tmp_path / "report", tmp_path / "other"
    other.write_text("other")
    if kind == "link":
        path.symlink_to(other)
    elif kind == "hard link":
        path.hardlink_to(other)
    else:
        _make(path, kind)
    with in_time(), pytest.raises(OSError):
        host_files.create_private(str(path))
    assert other.read_text() == "other"


# Who could lead root elsewhere ----------------------------------------------------------------


@pytest.fixture
def as_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat the user who runs the tests as root."""
    ours = os.getuid()
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(host_files, "is_roots", lambda uid: uid in (0, ours))


@pytest.mark.usefixtures("as_root")
@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("own/file", ""),
        ("own/missing/more", ""),
        ("own/file/more", ""),
        ("open/file", "open, which every user may change"),
        ("open/missing", "open, which every user may change"),
        ("own/../open/file", "open, which every user may change"),
        ("open/../own", "open, which every user may change"),
        ("sticky/missing", ""),
        ("sticky/missing/more", "sticky/missing, which any user could create"),
        ("to-sticky/missing/more", "sticky/missing, which any user could create"),
        ("to-own/file", ""),
        ("to-open/file", "open, which every user may change"),
        ("whole/file", ""),
        ("round/file", "round, which user"),
        ("open-too", "open-too, which every user may change"),
    ],
)
def test_a_path_that_others_can_change_is_detected(tmp_path: Path, path: str, why: str) -> None:
    for name, mode in (("own", 0o755), ("open", 0o777), ("sticky", 0o1777), ("open-too", 0o707)):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(mode)
    (tmp_path / "own/file").touch()
    for name, target in (
        ("to-own", "sticky/../own"),
        ("to-open", "own/../open"),
        ("to-sticky", "own/../sticky"),
        ("whole", f"{tmp_path}/own"),
        ("round", "round"),
    ):
        (tmp_path / name).symlink_to(target)
    if why:
        with pytest.raises(UntrustedPathError, match=why):
            host_files.check_way(f"{tmp_path}/{path}")
    else:
        host_files.check_way(f"{tmp_path}/{path}")


@pytest.mark.usefixtures("as_root")
@pytest.mark.parametrize("kind", ["folder", "link"])
def test_a_path_removed_during_the_check_counts_as_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    (tmp_path / "one").mkdir()
    if kind == "link":
        (tmp_path / "two").symlink_to("one")
    real, name = os.lstat, str(tmp_path / ("two" if kind == "link" else "one"))

    def remove_after(path: str) -> os.stat_result:
        status = real(path)
        if path == name:
            (os.unlink if kind == "link" else os.rmdir)(path)
        return status

    monkeypatch.setattr(os, "lstat", remove_after)
    host_files.check_way(f"{name}/file")
    assert not os.path.lexists(name)


@pytest.mark.protects(
    "read-writers", "files that root executes are checked and read through the same descriptor"
)
@pytest.mark.usefixtures("as_root")
def test_files_writable_by_others_are_refused_even_if_swapped_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user's file that replaces the checked one at any moment must be refused."""
    path, theirs = tmp_path / "file", tmp_path / "theirs"
    path.write_text("ours")
    path.chmod(0o644)
    theirs.write_text("theirs")
    theirs.chmod(0o646)
    assert host_files.read_roots(str(path)) == b"ours"
    with pytest.raises(OSError, match="larger than 3 bytes"):
        host_files.read_roots(str(path), 3)
    with pytest.raises(FileNotFoundError):
        host_files.read_roots(str(tmp_path / "missing"))
    for mode in (0o664, 0o646):
        path.chmod(mode)
        with pytest.raises(UntrustedPathError, match="may be written by non-root users"):
            host_files.read_roots(str(path))
    path.chmod(0o644)
    real = host_files.check_way

    def swap_after(way: str) -> None:
        real(way)
        theirs.rename(path)

    monkeypatch.setattr(host_files, "check_way", swap_after)
    with pytest.raises(UntrustedPathError, match="may be written by non-root users"):
        host_files.read_roots(str(path))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
@pytest.mark.parametrize(("mode", "owner"), [(0o755, 1000), (0o775, 1000), (0o1777, 0)])
def test_the_owner_of_a_replaced_file_is_kept(tmp_path: Path, mode: int, owner: int) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    folder.chmod(mode)
    path = folder / "file"
    path.write_text("old")
    path.chmod(0o640)
    os.chown(path, owner, owner)
    host_files.replace(str(path), b"new")
    status = path.stat()
    assert (path.read_text(), status.st_uid, status.st_mode & 0o777) == ("new", owner, 0o640)

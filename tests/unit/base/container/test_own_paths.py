"""Paths below a driver root, owned by root (here by the current user) or by other users."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuhook.base.container import rootfs
from gpuhook.base.container.rootfs import Rootfs, find_socket
from gpuhook.base.errors import UntrustedPathError


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Rootfs]:
    for path in ("usr/lib/file", "tmp/file", "run/daemon/file"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(path)
    (tmp_path / "tmp").chmod(0o1777)
    (tmp_path / "lib").symlink_to("usr/lib")
    (tmp_path / "usr/lib/link").symlink_to("/lib/file")
    (tmp_path / "usr/lib/out").symlink_to("/tmp/file")
    with Rootfs(str(tmp_path)) as root:
        yield root


def test_trusted_paths_are_opened_and_resolved(host: Rootfs) -> None:
    fd = host.open_own("/usr/lib/file")
    try:
        assert os.path.samestat(os.fstat(fd), os.stat(f"{host.path}/usr/lib/file"))
    finally:
        os.close(fd)
    assert host.own_path("/lib/link") == "/usr/lib/file"
    assert host.own_path("//lib/../lib/./file") == "/usr/lib/file"
    assert host.own_path("/") == "/"


@pytest.mark.protects(
    "driver-link",
    "a driver path that is mounted in a container is not a symbolic link",
    instead="if everybodys:",
)
@pytest.mark.parametrize("path", ["/tmp/file", "/tmp/nowhere/file", "/tmp", "/usr/lib/link"])
def test_untrusted_paths_and_links_are_refused(host: Rootfs, path: str) -> None:
    with pytest.raises(UntrustedPathError, match=r"No file from .* is passed to containers"):
        host.open_own(path)


@pytest.mark.protects(
    "driver-link",
    "a driver path that is mounted in a container is not a symbolic link",
    instead="if everybodys:",
)
@pytest.mark.parametrize("path", ["/tmp/file", "/usr/lib/out", "/lib/out", "/tmp/nowhere"])
def test_links_to_untrusted_paths_are_refused(host: Rootfs, path: str) -> None:
    with pytest.raises(UntrustedPathError):
        host.own_path(path)


@pytest.mark.parametrize("path", ["/lib/file", "/usr/nowhere", "/usr/lib/file/below"])
def test_intermediate_links_and_missing_paths_are_errors(host: Rootfs, path: str) -> None:
    with pytest.raises(OSError, match=r"Not a directory|No such file"):
        host.open_own(path)


def test_a_folder_of_another_user_is_refused(host: Rootfs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rootfs, "is_own", lambda _: False)
    for ask in (host.open_own, host.own_path):
        with pytest.raises(UntrustedPathError, match="it belongs to user"):
            ask("/usr/lib/file")


def test_a_world_writable_root_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    tmp_path.chmod(0o777)
    with Rootfs(str(tmp_path)) as root:
        for ask in (root.open_own, root.own_path):
            with pytest.raises(UntrustedPathError, match="all users may write"):
                ask("/file")


def test_only_a_trusted_socket_is_opened(host: Rootfs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(f"{host.path}/run/daemon")
    with socket.socket(socket.AF_UNIX) as mine:
        mine.bind("socket")
    os.close(host.open_socket("/run/daemon/socket"))
    Path("other").hardlink_to("socket")
    with pytest.raises(UntrustedPathError, match="it isn't a socket"):
        host.open_socket("/run/daemon/socket")
    Path("other").unlink()
    with pytest.raises(UntrustedPathError, match="it isn't a socket"):
        host.open_socket("/run/daemon/file")
    with pytest.raises(FileNotFoundError):
        host.open_socket("/run/nowhere/socket")
    Path(host.path, "run/daemon").chmod(0o1777)
    with pytest.raises(UntrustedPathError, match="all users may write"):
        host.open_socket("/run/daemon/socket")


def test_a_socket_is_found_in_nested_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / "1/2/3"
    deep.mkdir(parents=True)
    for number in range(20):
        (tmp_path / f"1/file{number}").write_text("")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("1/2/3/socket")
    fd = os.open(tmp_path, os.O_PATH)
    try:
        assert find_socket(fd) == ""
        monkeypatch.chdir(deep)
        with socket.socket(socket.AF_UNIX) as mine:
            mine.bind("socket")
        assert find_socket(fd) == "1/2/3/socket"
        assert find_socket(fd, 4) == "1/2/3/socket"
        assert find_socket(fd, 3) == ""
        monkeypatch.setattr(rootfs, "_MOST_ENTRIES", 5)
        assert find_socket(fd) == ""
    finally:
        os.close(fd)

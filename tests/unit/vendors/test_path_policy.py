"""Paths that no container gets, whichever vendor's list names them, and in any form."""

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpuhook.base.config.declared import DeclaredTable
from gpuhook.base.config.model import Config
from gpuhook.base.container.rootfs import Rootfs
from gpuhook.base.errors import DriverError
from gpuhook.core import contract
from gpuhook.core.plan.operations import FILE_OPTIONS, BindFile, usable
from gpuhook.monitor.vendors import survey
from gpuhook.vendors import path_policy, registry
from gpuhook.vendors.ascend import lists
from gpuhook.vendors.ascend.model import LISTS
from gpuhook.vendors.declared import discover as declared
from gpuhook.vendors.declared.names import names_of
from gpuhook.vendors.nvidia import tegra

Found = tuple[list[str], list[str]]  # the allowed paths, and the reasons for refusals


def of_ascend(root: Path, *paths: str) -> Found:
    """Return the paths and the refusals of an Ascend list."""
    folder = root / LISTS.lstrip("/")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "base.list").write_text("".join(f"{path}\n" for path in paths))
    with Rootfs(str(root)) as host:
        found = lists.find(host)
    refused = [text for each in found.lists for text in each.refused]
    return [file.path for file in found.files], refused


def of_tegra(root: Path, *paths: str) -> Found:
    """Return the paths and the refusals of a Tegra list that has every path as each type."""
    lines = [
        tegra.ListEntry("l4t.csv", 1, f"{kind}, {path}") for path in paths for kind in tegra.TYPES
    ]
    refused: dict[str, None] = {}
    with Rootfs(str(root)) as host:
        files = [*tegra._files(host, [each for each in lines if not each.problem], (), refused)]
    found = dict.fromkeys(file.path for file in files if file.kind != "link")
    return list(found), list(refused)


def of_table(root: Path, *paths: str) -> Found:
    """Return the paths and the refusals of a vendor's table.

    The table has every path as a file and as a folder.
    """
    (root / "etc").mkdir(exist_ok=True)
    (root / "etc/maker").write_text("")
    table = DeclaredTable(
        {
            "name": "maker",
            "kind": "maker.example/npu",
            "variable": "MAKER_VISIBLE_DEVICES",
            "present": "/etc/maker",
            "nodes": ["/dev/maker{n}"],
            "files": list(paths),
            "folders": list(paths),
            "libraries": [f"{path}/lib*.so" for path in paths],
        }
    )
    found = declared.discover(str(root), names_of(table), "/srv/gpuhook.toml")
    return [file.path for file in found.files], list(found.refused)


LISTERS = pytest.mark.parametrize("lister", [of_ascend, of_tegra, of_table])
Lister = Callable[..., Found]


def listening(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    before = Path.cwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(before)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A host with engines, their sockets, and a folder of a driver."""
    for path in ("docker.sock", "containerd/containerd.sock", "maker/deep/er/socket"):
        listening(tmp_path / "run" / path)
    (tmp_path / "var").mkdir()
    (tmp_path / "var/run").symlink_to("/run")
    (tmp_path / "opt/driver").mkdir(parents=True)
    (tmp_path / "opt/driver/file").write_text("")
    for name, target in (("docker", "/run/docker.sock"), ("run", "/var/run"), ("up", "..")):
        (tmp_path / "opt" / name).symlink_to(target)
    return tmp_path


SPELLINGS = [
    "/run/docker.sock", "/var/run/docker.sock", "//run/docker.sock", "///var//run///docker.sock",
    "/run/./docker.sock", "/opt/docker", "/opt/run/docker.sock", "/opt/up/run/docker.sock",
    "/run", "/var/run", "//run", "/run/", "/var/run/.", "/opt/run", "/run/containerd",
    "/opt/run/containerd", "/run/containerd/containerd.sock", "/run/maker", "/run/maker/deep",
    "/run/maker/deep/er/socket", "/", "//", "/opt/up", "/opt/../run", "/var",
]  # fmt: skip


@pytest.mark.protects(
    "listed-socket",
    "a folder that contains a socket isn't mounted from a vendor's file list",
    instead='return ""',
)
@LISTERS
@pytest.mark.parametrize("path", SPELLINGS)
def test_a_listed_socket_is_refused_in_any_spelling(root: Path, lister: Lister, path: str) -> None:
    found, refused = lister(root, path, "/opt/driver/file")
    assert found == ["/opt/driver/file"]
    assert refused or ".." in path or lister is of_table, "it is said"


@pytest.mark.protects(
    "everybodys-folder", "files in world-writable folders are never part of a driver"
)
@LISTERS
def test_paths_in_world_writable_folders_are_refused(root: Path, lister: Lister) -> None:
    for name in ("tmp", "opt/shared"):
        (root / name / "made").mkdir(parents=True)
        (root / name / "made/file").write_text("")
        (root / name).chmod(0o1777)
    (root / "opt/link").symlink_to("/tmp/made")
    paths = ("/tmp", "/tmp/made", "/tmp/made/file", "/opt/shared", "/opt/shared/made", "/opt/link")
    found, refused = lister(root, *paths)
    assert found == []
    assert len(refused) >= len(paths)
    assert all("which non-root users may change" in text for text in refused)


@LISTERS
def test_a_socket_created_later_is_found_before_the_mount(root: Path, lister: Lister) -> None:
    """The check before each mount searches daemons' folders again."""
    folder = root / "run/other/deep"
    folder.mkdir(parents=True)
    found, _ = lister(root, "/run/other")
    assert found == ["/run/other"]
    operation = BindFile(str(root), "/run/other", "/run/other", FILE_OPTIONS, "test")
    assert usable([operation]) == ([operation], [])
    listening(folder / "socket")
    kept, [why] = usable([operation])
    assert kept == []
    assert why.endswith("/run/other is passed to containers: it contains the socket deep/socket")


def test_paths_that_cannot_be_examined_are_refused(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Rootfs, __: str) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Rootfs, "own_path", fail)
    with Rootfs(str(root)) as host:
        listed = path_policy.ListedPath(host, "/opt/driver")
    assert not listed.is_given
    assert "Permission denied" in listed.refusal


@pytest.mark.protects(
    "vendor-error",
    "an I/O error while reading a vendor's driver files is reported as a driver error",
    instead="except ZeroDivisionError as error:",
)
@pytest.mark.parametrize("name", registry.BUILT_IN)
def test_an_os_error_in_discovery_becomes_a_driver_error(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    vendor = contract.load(registry.BUILT_IN[name])

    def fail(*_: Any) -> None:
        raise OSError(5, "Input/output error", "/usr/bin")

    monkeypatch.setattr(type(vendor), "_discover", fail)
    config = Config()
    config.root = str(tmp_path)
    with pytest.raises(DriverError, match=f"{vendor.names.TITLE}'s driver .*Input/output error"):
        vendor.discover(config)
    with pytest.raises(DriverError):
        survey.present(config, lambda each: each.discover(config))

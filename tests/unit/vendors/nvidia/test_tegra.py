"""Tegra's lists: their lines, the lists that count, and the links that are left out."""

import os
from pathlib import Path
from typing import Any

import pytest

from gpuhook.base.config.model import Config
from gpuhook.base.container.rootfs import Rootfs
from gpuhook.base.errors import DriverError
from gpuhook.vendors.nvidia import tegra

Case = dict[str, Any]
LISTS = "etc/nvidia-container-runtime/host-files-for-container.d"


@pytest.mark.vectors("csv", "csv.line")
def test_list_lines_match_the_vectors(case: Case) -> None:
    kind, path, problem = tegra.read_line(case["input"]["line"])
    expected = case["expected"]
    if expected.get("error"):
        assert problem
        return
    found = {str(value) for value in expected.values()}
    assert not problem
    assert {kind, path} & found


@pytest.mark.vectors("csv", "csv.ignore_patterns")
def test_ignored_links_match_the_vectors(case: Case) -> None:
    given = case["input"]
    kept = [path for path in given["symlinks"] if not tegra.is_ignored(path, given["patterns"])]
    assert kept == case["expected"]["kept"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("dev , /a/path,with,commas ", ("dev", "/a/path,with,commas")),
        ("sym,/a//b/./c", ("sym", "/a/b/c")),
        ("lib, /a/..b", ("lib", "/a/..b")),
    ],
)
def test_valid_lines_are_parsed(line: str, expected: tuple[str, str]) -> None:
    assert tegra.read_line(line) == (*expected, "")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", "comma"),
        (",", "comma"),
        ("dev /dev/x", "comma"),
        ("DEV, /dev/x", "another type"),
        ("dev, dev/x", "absolute"),
        ("dev, /dev/../etc/x", "without .."),
        ("lib, /a/..", "without .."),
        ("lib, /a\0b", "absolute"),
    ],
)
def test_malformed_lines_are_refused(line: str, words: str) -> None:
    assert words in tegra.read_line(line)[2]


@pytest.mark.parametrize(
    ("path", "pattern", "ignored"),
    [
        ("/a/b", "/a/*", True),
        ("/a/b/c", "/a/*", False),
        ("/a/b/c", "**/c", True),
        ("/a/b/c", "**/b/c", False),
        ("/a/lib1", "/a/lib[^2]", True),
        ("/a/lib2", "/a/lib[^2]", False),
    ],
)
def test_ignore_patterns_match_as_in_go(path: str, pattern: str, ignored: bool) -> None:
    assert tegra.is_ignored(path, [pattern]) == ignored


def write(root: Path, path: str, text: str = "") -> Path:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def test_only_csv_files_directly_in_the_tegra_list_folder_are_read(tmp_path: Path) -> None:
    for name in ("l4t.csv", "B.CSV", ".csv", "l4t.csv.bak", "text"):
        write(tmp_path, f"{LISTS}/{name}", "lib, /x")
    write(tmp_path, f"{LISTS}/below/more.csv", "lib, /x")
    with Rootfs(str(tmp_path)) as root:
        found = list(tegra.entries(root, f"/{LISTS}"))
        assert list(tegra.entries(root, "/absent")) == []
    assert [(each.list.rpartition("/")[2], each.capability) for each in found] == [
        ("B.CSV", "csv-mounts"),
        ("l4t.csv", ""),
    ]


@pytest.mark.parametrize(
    ("pattern", "paths"),
    [
        ("/dev/dri/card*", ["/dev/dri/card0", "/dev/dri/card1"]),
        ("/dev/dri/card?", ["/dev/dri/card0", "/dev/dri/card1"]),
        ("/dev/dri/card[^0]", ["/dev/dri/card1"]),
        ("/dev/*/card0", ["/dev/dri/card0"]),
        ("/dev/*", ["/dev/dri"]),
        ("/*/dri/by-path", ["/dev/dri/by-path"]),
        ("/dev/dri/renderD*", ["/dev/dri/renderD*"]),
        ("/dev/card*/x", ["/dev/card*/x"]),
        ("/dev/dri/card0", ["/dev/dri/card0"]),
    ],
)
def test_a_device_path_pattern_is_expanded(tmp_path: Path, pattern: str, paths: list[str]) -> None:
    """JetPack's own devices.csv has patterns of /dev/dri. A pattern without a match is skipped."""
    for name in ("card0", "card1", "by-path/x"):
        write(tmp_path, f"dev/dri/{name}")
    write(tmp_path, f"{LISTS}/devices.csv", f"dev, {pattern}\ndev, /dev/../{pattern}\n")
    with Rootfs(str(tmp_path)) as root:
        found = [*tegra.entries(root, f"/{LISTS}")]
    assert [each.path for each in found if not each.problem] == paths
    assert [each.number for each in found] == [*(1 for _ in paths), 2]


def test_a_listed_folder_in_dev_gives_only_its_links(tmp_path: Path) -> None:
    (tmp_path / "dev/dri/by-path").mkdir(parents=True)
    (tmp_path / "dev/dri/by-path/platform-card").symlink_to("../card0")
    write(tmp_path, "dev/dri/by-path/file")
    (tmp_path / "dev/dri/empty").mkdir()
    (tmp_path / "dev/everybodys").mkdir()
    (tmp_path / "dev/everybodys").chmod(0o777)
    (tmp_path / "dev/everybodys/link").symlink_to("/dev/sda")
    folders = ("dri/by-path", "dri/empty", "everybodys")
    lines = [tegra.ListEntry("l4t.csv", 1, f"dir, /dev/{folder}") for folder in folders]
    refused: dict[str, None] = {}
    with Rootfs(str(tmp_path)) as root:
        files = [*tegra._files(root, lines, (), refused)]
    assert [(file.kind, file.path, file.target) for file in files] == [
        ("link", "/dev/dri/by-path/platform-card", "../card0")
    ]
    assert [text.partition(",")[0].rpartition("/")[2] for text in refused] == [
        "empty",
        "everybodys",
    ]


def test_lists_writable_by_others_are_ignored(tmp_path: Path) -> None:
    write(tmp_path, f"{LISTS}/l4t.csv", "lib, /x").chmod(0o666)
    with Rootfs(str(tmp_path)) as root:
        assert list(tegra.entries(root, f"/{LISTS}")) == []


def test_an_oversized_list_is_refused(tmp_path: Path) -> None:
    os.truncate(write(tmp_path, f"{LISTS}/l4t.csv"), 1 << 30)
    with Rootfs(str(tmp_path)) as root, pytest.raises(DriverError, match=r"l4t\.csv can't be read"):
        list(tegra.entries(root, f"/{LISTS}"))


@pytest.mark.parametrize(
    ("path", "text", "here"),
    [
        ("etc/nv_tegra_release", "", True),
        ("sys/devices/soc0/family", "Tegra\n", True),
        ("sys/devices/soc0/family", "tegra234\n", True),
        ("sys/devices/soc0/family", "Freescale i.MX\n", False),
        ("etc/other", "", False),
    ],
)
def test_tegra_is_detected_by_release_file_or_soc_family(
    tmp_path: Path, path: str, text: str, here: bool
) -> None:
    write(tmp_path, path, text)
    with Rootfs(str(tmp_path)) as root:
        assert tegra.is_here(root) == here


@pytest.mark.parametrize(
    "content",
    [
        "folder/../b/c",
        "/usr/lib/folder/../b/c",
        "folder/.././b//c",
        "folder/../b/c/",
        "d/../../b/c",
        "../../other/b/c",
    ],
)
def test_parent_folders_in_links_are_resolved_as_by_the_kernel(
    tmp_path: Path, content: str
) -> None:
    """The kernel follows a link before it resolves .., so .. may be another folder."""
    write(tmp_path, "other/b/c")
    (tmp_path / "other/deep/below").mkdir(parents=True)
    (tmp_path / "usr/lib").mkdir(parents=True)
    (tmp_path / "usr/lib/folder").symlink_to("/other/deep")
    (tmp_path / "usr/lib/d").symlink_to("folder/below")
    (tmp_path / "usr/lib/x").symlink_to(content)
    entry = tegra.ListEntry("l4t.csv", 1, "sym, /usr/lib/x")
    with Rootfs(str(tmp_path)) as root:
        files = [*tegra._files(root, [entry], (), {})]
    assert [(file.kind, file.path, file.target) for file in files] == [
        ("link", "/usr/lib/x", content),
        ("config", "/other/b/c", "/other/b/c"),
    ]


def test_a_tegra_without_a_device_node_has_no_gpu(tmp_path: Path) -> None:
    write(tmp_path, f"{LISTS}/l4t.csv", "dev, /dev/absent\ndev, /etc/nv_tegra_release")
    write(tmp_path, "etc/nv_tegra_release")
    with Rootfs(str(tmp_path)) as root, pytest.raises(DriverError, match="no list in"):
        tegra.discover(root, Config())

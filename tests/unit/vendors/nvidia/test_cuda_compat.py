"""Use of an image's newer CUDA: search in real folders, and rules of the choice."""

import json
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from yardstick import costs_less

from gpuhook.base.config.loader import loads
from gpuhook.base.config.model import Config
from gpuhook.base.container.rootfs import Rootfs
from gpuhook.vendors.nvidia import cuda_compat

Case = dict[str, Any]


def note_of(data: object) -> cuda_compat.Note | None:
    return cuda_compat.parse_note(json.dumps(data).encode())


def lay_out(root: Path, entries: list[str]) -> None:
    """Make empty files, and links written as "path -> target"."""
    for entry in entries:
        path, arrow, target = entry.partition(" -> ")
        place = root / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        if arrow:
            place.symlink_to(target)
        else:
            place.touch()


@pytest.mark.vectors("cuda_compat", "cuda_compat.directory")
def test_the_compat_folder_is_chosen_as_in_the_vectors(case: Case, tmp_path: Path) -> None:
    lay_out(tmp_path, case["input"]["files_without_elf_note"])
    folder = case["input"]["cuda_compat_container_root"]
    with Rootfs(str(tmp_path)) as root:
        version = cuda_compat.compat_version(root.list_folder(folder))
        use = version and cuda_compat.decide(version, case["input"]["host_driver_version"])
        found = root.real_path(folder) if use else ""
    assert found == case["expected"]["directory"]


@pytest.mark.vectors("cuda_compat", "cuda_compat.elf_note")
def test_elf_notes_are_judged_as_in_the_vectors(case: Case) -> None:
    given_ = case["input"]
    note = note_of(given_["note"])
    assert note is not None
    found = cuda_compat.decide(
        given_["compat_driver"], given_["host_driver"], given_["host_cuda"], note
    )
    assert found is case["expected"]["use"]


@pytest.mark.vectors("hook", "hook.cuda_compat_flag")
def test_compat_modes_match_the_vectors(case: Case) -> None:
    """Each mode in which NVIDIA uses the image's CUDA, hook included, enables gpuhook's use."""
    word = case["input"]["cuda-compat-mode"]
    config = loads(f'nvidia-container-runtime.modes.legacy.cuda-compat-mode = "{word}"')
    by_library = case["expected"]["flags"] != ["--cuda-compat-mode=disabled"]
    assert cuda_compat.wanted(config) is (by_library or word == "hook")


def test_cuda_compat_can_be_disabled_by_a_feature() -> None:
    assert cuda_compat.wanted(loads(""))
    assert not cuda_compat.wanted(loads("features.disable-cuda-compat-lib-hook = true"))


@pytest.mark.parametrize(
    ("library", "driver", "cuda", "use"),
    [
        ("580.1", "535.309.01", "", True),
        ("580.1", "535.309.01", "12.2", True),
        ("535.400", "535.309.01", "", False),
        ("1000.1", "999.1", "", True),
        ("580.1", "", "", False),
        ("580.1", "", "12.2", False),
        ("580.1", "N/A", "", False),
        ("580.x", "535.1", "", False),
        ("", "535.1", "", False),
    ],
)
def test_without_a_note_the_driver_versions_decide(
    library: str, driver: str, cuda: str, use: bool
) -> None:
    assert cuda_compat.decide(library, driver, cuda) is use


@pytest.mark.parametrize(
    ("library", "driver", "cuda", "use"),
    [
        ("575.57.08", "570.1", "12.9", True),
        ("575.57.08", "570.1", "12.8", True),
        ("575.57.08", "545.1", "12.3", False),
        ("575.57.08", "", "12.8", True),
        ("bad", "570.1", "12.8", True),
        ("575.57.08", "", "", False),
        ("575.57.08", "", "unreadable", False),
    ],
)
def test_with_a_note_its_cuda_version_and_branches_decide(
    library: str, driver: str, cuda: str, use: bool
) -> None:
    note = note_of({"Format": 1, "CUDA Version": "12.9", "Driver": [535, 570, 575], "Device": []})
    assert cuda_compat.decide(library, driver, cuda, note) is use


# Notes of NVIDIA's libraries with the exact bytes of the section; the keys are in lower case.
NOTES = {
    "575.57.08": b'{"format":1,"CUDA version":"12.9","driver":[535,550,560,565,570,575],'
    b'"device":[1,2,7,8,9,10,11,12,13,14]}\0',
    "580.126.20": b'{"format":1,"CUDA version":"13.0","driver":[535,550,570,575,580],'
    b'"device":[1,2,7,8,9,10,11,12,13,14]}\0',
    "590.44.01": b'{"format":1,"CUDA version":"13.1","driver":[535,550,570,575,580,590],'
    b'"device":[1,2,7,8,9,10,11,12,13,14]}\0',
    "1.1": b'{"format":1,"CUDA version":"13.2"}\0',  # from Orin; it names no driver branch
}


@pytest.mark.parametrize(
    ("library", "driver", "cuda", "use"),
    [
        ("575.57.08", "525.60.13", "12.0", False),
        ("575.57.08", "535.309.01", "12.2", True),
        ("575.57.08", "575.10.10", "12.9", True),
        ("575.57.08", "575.99.99", "12.9", False),
        ("575.57.08", "590.44.01", "13.1", False),
        ("580.126.20", "580.65.06", "13.0", True),
        ("580.126.20", "565.57.01", "12.7", False),
        ("580.126.20", "560.35.03", "12.6", False),
        ("590.44.01", "580.126.20", "13.0", True),
        ("590.44.01", "560.35.03", "12.6", False),
        ("590.44.01", "590.44.01", "13.1", False),
        ("590.44.01", "", "13.0", True),
        ("1.1", "540.4.0", "12.6", False),
        ("1.1", "", "12.6", True),
        ("1.1", "", "13.2", False),
    ],
)
def test_notes_of_real_libraries_decide_as_expected(
    library: str, driver: str, cuda: str, use: bool
) -> None:
    note = cuda_compat.parse_note(NOTES[library])
    assert note is not None
    assert cuda_compat.decide(library, driver, cuda, note) is use


@pytest.mark.parametrize("change", [str, str.lower, str.upper, str.title, str.swapcase])
def test_note_keys_are_read_in_any_case(change: Callable[[str], str]) -> None:
    data = {"Format": 1, "CUDA Version": "12.9", "Driver": [535], "Device": [1]}
    note = note_of({change(key): value for key, value in data.items()})
    assert note is not None
    assert (note.cuda, note.branches) == ("12.9", (535,))


@pytest.mark.parametrize(
    ("text", "cuda", "branches"),
    [
        ('{"format":2,"Format":1,"driver":[535],"Driver":[570]}', "", (570,)),
        ('{"format":1,"CUDA version":null,"driver":null}', "", ()),
        ('{"format":1,"CUDA version":"12.9"}', "12.9", ()),
        ('{"FORMAT":1,"CUDA VER\u017fION":"12.9","driver":[]}', "12.9", ()),
    ],
)
def test_duplicate_and_null_note_keys_are_read_as_in_go(
    text: str, cuda: str, branches: tuple[int, ...]
) -> None:
    note = cuda_compat.parse_note(text.encode())
    assert note is not None
    assert (note.cuda, note.branches) == (cuda, branches)


@pytest.mark.parametrize(
    "data",
    [
        None, 1, [], {}, {"Format": 2, "CUDA Version": "12.9", "Driver": []},
        {"Format": 1, "CUDA Version": 12.9, "Driver": []},
        {"Format": 1, "CUDA Version": "12.9", "Driver": ["535"]},
        {"Format": 1, "CUDA Version": "12.9", "Driver": "535"},
        {"format": 1, "CUDA version": "12.9", "driver": [True]},
        {"format": True, "CUDA version": "12.9", "driver": [535]},
        {"format": 1, "CUDA version": "12.9", "driver": [535], "DRIVER": "535"},
        {"format": None, "CUDA version": "12.9", "driver": [535]},
    ],
)  # fmt: skip
def test_a_note_with_unexpected_content_is_ignored(data: object) -> None:
    assert note_of(data) is None


@pytest.mark.parametrize(
    "content", [b"", b"\0", b"\xff", b"{", b"[" * 50_000, b'{"a": ' * 5000, b" " * 100_000]
)
def test_a_note_that_is_not_json_is_ignored(content: bytes) -> None:
    assert cuda_compat.parse_note(content) is None


def test_a_note_with_trailing_padding_is_read() -> None:
    content = b'{"Format":1,"CUDA Version":"12.9","Driver":[535]}\0\0\0'
    note = cuda_compat.parse_note(content)
    assert note is not None
    assert (note.cuda, note.branches) == ("12.9", (535,))


@given(st.binary())
def test_any_note_is_read_or_ignored(content: bytes) -> None:
    note = cuda_compat.parse_note(content)
    assert note is None or isinstance(note.cuda, str)


@pytest.mark.parametrize(
    ("names", "version"),
    [
        ([], None),
        (["libcuda.so.1", "libcuda.so"], None),
        (["libcuda.so.580.1", "libcuda.so.1", "libnvidia-nvvm.so.580.1"], "580.1"),
        (["libcuda.so.580.1", "libcuda.so.575.1"], None),
        (["libcudadebugger.so.580.1"], None),
        (["libcuda.so.580.65.06"], "580.65.06"),
    ],
)
def test_the_compat_version_is_read_from_library_names(
    names: list[str], version: str | None
) -> None:
    assert cuda_compat.compat_version(names) == version


# What an image's folder costs ----------------------------------------------------------------


@pytest.mark.protects(
    "compat-names",
    "an image's huge CUDA compat folder isn't read completely",
    instead="names = root.list_folder(place)",
)
def test_a_huge_compat_folder_is_not_read_whole(tmp_path: Path) -> None:
    folder = tmp_path / "usr/local/cuda/compat"
    folder.mkdir(parents=True)
    for number in range(5000):
        (folder / f"{number:0200}").touch()
    with Rootfs(str(tmp_path)) as root:
        cuda_compat.find_newer(root, Config())
        tracemalloc.start()
        try:
            assert cuda_compat.find_newer(root, Config()) is None
            most = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert most < 100_000  # bytes; all names together have a million


@pytest.mark.protects(
    "elf-headers", "an image's CUDA library with too many ELF segments is ignored"
)
@pytest.mark.protects(
    "elf-dynamic", "an image's CUDA library with an oversized ELF dynamic section is ignored"
)
@pytest.mark.parametrize(("segments", "size"), [(0xFFFF, 1 << 20), (2, 1 << 20), (0xFFFF, 1 << 10)])
def test_cuda_libraries_with_huge_elf_headers_are_ignored_quickly(
    segments: int, size: int, tmp_path: Path
) -> None:
    """The folder has the most libraries that gpuhook reads, each with the most headers possible."""
    folder = tmp_path / "usr/local/cuda/compat"
    folder.mkdir(parents=True)
    first = folder / "libcuda.so.999.1"
    first.write_bytes(expensive_library(segments, size))
    for number in range(63):
        (folder / f"lib{number}.so").hardlink_to(first)
    with Rootfs(str(tmp_path)) as root:
        assert costs_less(lambda: cuda_compat.find_newer(root, Config()), 15)
        found = cuda_compat.find_newer(root, Config())
    assert found is not None
    assert found.libraries == ()


@pytest.mark.protects(
    "compat-files",
    "an image's CUDA compat folder with too many files is ignored",
    instead="if not names:",
)
def test_a_compat_folder_with_too_many_files_is_ignored(tmp_path: Path) -> None:
    folder = tmp_path / "usr/local/cuda/compat"
    folder.mkdir(parents=True)
    (folder / "libcuda.so.999.1").touch()
    with Rootfs(str(tmp_path)) as root:
        assert cuda_compat.find_newer(root, Config()) is not None
        for number in range(64):
            (folder / f"lib{number}.so").touch()
        assert cuda_compat.find_newer(root, Config()) is None


def expensive_library(count: int, size: int) -> bytes:
    """Return a library with this many segments, and a dynamic section of this many bytes."""
    start = 64 + 56 * count
    head = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    head += struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 64, 0, 0, 64, 56, count, 0, 0, 0)
    other = struct.pack("<IIQQQQQQ", 6, 0, 0, 0, 0, 0, 0, 0)
    loaded = struct.pack("<IIQQQQQQ", 1, 0, 0, 0, 0, start + size, 0, 0)
    dynamic = struct.pack("<IIQQQQQQ", 2, 0, start, 0, 0, size, 0, 0)
    entries = struct.pack("<qQqQqQ", 5, start, 10, size, 14, 0)
    entries += struct.pack("<qQ", 21, 0) * ((size - len(entries)) // 16)
    return head + other * (count - 2) + dynamic + loaded + entries

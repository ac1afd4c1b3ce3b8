"""image and layout: facts read from the files of an image."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import own
import pytest

from gpuhook.base.config.model import Config
from gpuhook.base.container.rootfs import Rootfs
from gpuhook.base.loader import layout
from gpuhook.core.plan import image
from gpuhook.vendors.nvidia import cuda_compat
from gpuhook.vendors.nvidia.names import NAME
from gpuhook.vendors.nvidia.vendor import VENDOR

LibraryBuilder = Callable[..., bytes]
COMPAT = "usr/local/cuda/compat"


def put(root: Path, path: str, content: bytes = b"") -> None:
    place = root / path
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(content)


def look(root: Path, config: Config | None = None) -> image.Image:
    with Rootfs(str(root)) as rootfs:
        return image.examine(rootfs, config or Config(), {NAME: VENDOR.examine})


def compat_in(root: Path, config: Config | None = None) -> Any:
    return look(root, config).brings[NAME]


def test_a_debian_image_gets_the_debian_layout(tmp_path: Path) -> None:
    put(tmp_path, "etc/debian_version")
    found = look(tmp_path).layout
    assert found.libraries == layout.debian(own.MACHINE).libraries
    assert found.uses_cache


def test_an_image_with_lib64_gets_lib64_and_lib(tmp_path: Path) -> None:
    put(tmp_path, "usr/lib64/libc.so.6")
    put(tmp_path, "usr/lib/x")
    found = look(tmp_path).layout
    assert (found.libraries, found.libraries32) == ("/usr/lib64", "/usr/lib")


def test_a_lib64_that_links_to_lib_gets_lib64_and_lib32(tmp_path: Path) -> None:
    put(tmp_path, "usr/lib/libc.so.6")
    (tmp_path / "usr/lib64").symlink_to("lib")
    found = look(tmp_path).layout
    assert (found.libraries, found.libraries32) == ("/usr/lib64", "/usr/lib32")


def test_a_musl_image_uses_no_linker_cache(tmp_path: Path) -> None:
    put(tmp_path, f"lib/ld-musl-{own.MACHINE}.so.1")
    found = look(tmp_path).layout
    assert (found.libraries, found.uses_cache) == ("/usr/lib", False)


def test_links_leading_out_of_the_image_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    put(tmp_path, "outside/debian_version")
    root = tmp_path / "root"
    root.mkdir()
    (root / "etc").symlink_to(tmp_path / "outside")
    assert look(root).layout.libraries == "/usr/lib64"


def test_an_empty_image_has_no_cuda_compat_libraries(tmp_path: Path) -> None:
    assert compat_in(tmp_path) is None


def test_cuda_compat_libraries_are_found_behind_a_link(
    tmp_path: Path, library: LibraryBuilder
) -> None:
    put(tmp_path, "usr/local/cuda-14.0/compat/libcuda.so.600.1.2", library("libcuda.so.1"))
    put(tmp_path, "usr/local/cuda-14.0/compat/libnvidia-nvvm.so.600.1.2", library("libnvvm.so.4"))
    put(tmp_path, "usr/local/cuda-14.0/compat/garbage.so.1.2", b"no library")
    (tmp_path / "usr/local/cuda").symlink_to("cuda-14.0")
    (tmp_path / "usr/local/cuda-14.0/compat/libcuda.so.1").symlink_to("libcuda.so.600.1.2")
    compat = compat_in(tmp_path)
    assert compat is not None
    assert compat.folder == "/usr/local/cuda-14.0/compat"
    assert compat.version == "600.1.2"
    assert compat.libraries == ("libcuda.so.1", "libnvvm.so.4")
    assert compat.note is None


def test_cuda_compat_libraries_are_found_at_the_configured_path(
    tmp_path: Path, library: LibraryBuilder
) -> None:
    put(tmp_path, "opt/compat/libcuda.so.600.1.2", library("libcuda.so.1"))
    assert compat_in(tmp_path) is None
    config = Config()
    config.cuda_compat_root = "/opt/compat"
    compat = compat_in(tmp_path, config)
    assert compat is not None
    assert (compat.folder, compat.libraries) == ("/opt/compat", ("libcuda.so.1",))


# Note sections of NVIDIA's libraries: the sizes in the header, the bytes after the owner's name,
# and the expected result.
NOTE_SECTIONS = {
    "575.57.08": (
        (19, 84, 0),
        b'{"format":1,"CUDA version":"12.9","driver":[535,550,560,565,570,575],"device":[1,2]}\0\0',
        ("12.9", (535, 550, 560, 565, 570, 575)),
    ),
    "Orin's, whose header has more bytes than follow": (
        (19, 41, 0),
        b'{"format":1,"CUDA version":"13.2"}\0\0\0\0\0',
        ("13.2", ()),
    ),
    "a stated length of 4 GiB": (
        (19, 0xFFFFFFFF, 0),
        b'{"format":1,"CUDA version":"13.2","driver":[580]}',
        ("13.2", (580,)),
    ),
    "cut short inside": ((19, 106, 0), b'{"format":1,"CUDA version":"12.9","driv', None),
    "nothing follows": ((19, 106, 0), b"", None),
    "an owner longer than the section": ((500, 41, 0), b'{"format":1}', None),
}


@pytest.mark.parametrize("name", NOTE_SECTIONS)
def test_the_cuda_compat_elf_note_is_read(
    tmp_path: Path, library: LibraryBuilder, name: str
) -> None:
    head, text, expected = NOTE_SECTIONS[name]
    note = struct.pack("<III", *head) + b"NVIDIA Corporation\0\0" + text
    content = library("libcuda.so.1", sections={cuda_compat.SECTION: note})
    put(tmp_path, f"{COMPAT}/libcuda.so.600.1.2", content)
    compat = compat_in(tmp_path)
    assert compat is not None
    found = compat.note and (compat.note.cuda, compat.note.branches)
    assert found == expected


@pytest.mark.parametrize("names", [["libcuda.so.1"], ["libcuda.so.600.1", "libcuda.so.601.1"]])
def test_no_or_several_compat_libcuda_files_are_not_used(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        put(tmp_path, f"{COMPAT}/{name}")
    assert compat_in(tmp_path) is None


def test_a_link_is_not_accepted_as_compat_libcuda(tmp_path: Path) -> None:
    put(tmp_path, f"{COMPAT}/other")
    (tmp_path / COMPAT / "libcuda.so.600.1.2").symlink_to("other")
    assert compat_in(tmp_path) is None


def test_a_compat_folder_of_too_many_files_is_not_read(
    tmp_path: Path, library: LibraryBuilder
) -> None:
    put(tmp_path, f"{COMPAT}/libcuda.so.600.1.2", library("libcuda.so.1"))
    for number in range(70):
        put(tmp_path, f"{COMPAT}/lib{number}.so.1", library(f"lib{number}.so.1"))
    assert compat_in(tmp_path) is None


@pytest.mark.parametrize("name", ["with\nnewline", "with blank", "by\udcffte", "x" * 300])
def test_a_compat_folder_with_an_unusable_name_is_ignored(
    tmp_path: Path, library: LibraryBuilder, name: str
) -> None:
    if len(name) < 256:
        put(tmp_path, f"opt/{name}/libcuda.so.600.1.2", library("libcuda.so.1"))
    link = tmp_path / COMPAT
    link.parent.mkdir(parents=True)
    link.symlink_to(f"/opt/{name}" if len(name) < 256 else name)
    assert compat_in(tmp_path) is None


def test_a_compat_library_with_an_unusable_soname_is_left_out(
    tmp_path: Path, library: LibraryBuilder
) -> None:
    put(tmp_path, f"{COMPAT}/libcuda.so.600.1.2", library("libcuda.so.1"))
    put(tmp_path, f"{COMPAT}/libodd.so.1", library("lib\nodd.so.1"))
    compat = compat_in(tmp_path)
    assert compat is not None
    assert compat.libraries == ("libcuda.so.1",)


def test_cuda_compat_libraries_are_ignored_when_disabled(
    tmp_path: Path, library: LibraryBuilder
) -> None:
    put(tmp_path, f"{COMPAT}/libcuda.so.600.1.2", library("libcuda.so.1"))
    config = Config()
    config.cuda_compat_mode = "disabled"
    assert compat_in(tmp_path, config) is None

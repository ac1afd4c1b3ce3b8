"""Search folders of an image's loader, derived from its files."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from gpuhook.base.container.rootfs import Rootfs
from gpuhook.base.loader import layout

MACHINE = os.uname().machine
DEBIAN = layout.debian(MACHINE)
MULTIARCH = DEBIAN.libraries


@pytest.mark.parametrize(
    ("files", "links", "expected"),
    [
        (["/etc/debian_version"], {}, DEBIAN.libraries),
        ([f"{MULTIARCH}/libc.so.6"], {}, DEBIAN.libraries),  # /etc is a volume
        ([f"{MULTIARCH}/libc.so.6"], {"lib": "usr/lib"}, DEBIAN.libraries),
        ([f"{MULTIARCH.removeprefix('/usr')}/libc.so.6"], {}, DEBIAN.libraries),
        (["/usr/lib64/libc.so.6", "/usr/lib/x"], {}, "/usr/lib64"),
        (["/etc/os-release"], {}, "/usr/lib64"),
        ([f"/lib/ld-musl-{MACHINE}.so.1"], {}, "/usr/lib"),
        ([f"/lib/ld-musl-{MACHINE}.so.1", "/usr/lib64/x"], {}, "/usr/lib64"),
    ],
)
def test_the_library_folder_of_an_image_is_found(
    tmp_path: Path, files: list[str], links: dict[str, str], expected: str
) -> None:
    for name, target in links.items():
        (tmp_path / name).symlink_to(target)
    for name in files:
        place = tmp_path / name.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.touch()
    with Rootfs(str(tmp_path)) as root:
        found = layout.of_image(root)
    assert found.libraries == expected
    assert found.uses_cache == (expected != "/usr/lib")


@pytest.mark.parametrize(
    ("folders", "links", "expected"),
    [
        (["usr/lib32", "usr/lib64"], {}, "/usr/lib32"),
        (["usr/lib", "usr/lib64"], {}, "/usr/lib"),
        (["usr/lib"], {"usr/lib64": "lib"}, "/usr/lib32"),
        (["usr/lib64"], {}, "/usr/lib32"),
    ],
)
def test_the_folder_of_32_bit_libraries_is_found(
    tmp_path: Path, folders: list[str], links: dict[str, str], expected: str
) -> None:
    for name in folders:
        (tmp_path / name).mkdir(parents=True)
    for name, target in links.items():
        (tmp_path / name).symlink_to(target)
    with Rootfs(str(tmp_path)) as root:
        assert layout.of_image(root).libraries32 == expected


# Links and entries ----------------------------------------------------------------------------


LibraryBuilder = Callable[..., bytes]


def test_the_numerically_highest_version_wins() -> None:
    libraries: list[tuple[str, str | None]] = [
        ("libcuda.so.99.9", "libcuda.so.1"),
        ("libcuda.so.535.54", "libcuda.so.1"),
        ("libcuda.so.535.309.01", "libcuda.so.1"),
        ("libnvidia-tls.so.535.309.01", "libnvidia-tls.so.535.309.01"),
        ("libplain.so", None),
    ]
    assert layout.links(libraries) == {"libcuda.so.1": "libcuda.so.535.309.01"}
    assert layout.winners(reversed(libraries)) == layout.winners(libraries)
    assert layout.winners(libraries)["libplain.so"] == "libplain.so"


@pytest.mark.parametrize("soname", ["../../../etc/shadow", "/etc/passwd", "..", ".", "a/b.so"])
def test_a_soname_that_is_a_path_makes_no_link(soname: str) -> None:
    assert layout.links([("libx.so.1.0", soname)]) == {}
    assert layout.cache_entries("/usr/lib", [("libx.so.1.0", soname)], 0x303) == []


def test_a_file_named_like_its_soname_is_not_replaced_by_a_link() -> None:
    libraries = [("libx.so.1", "libx.so.1"), ("libx.so.1.5", "libx.so.1")]
    assert layout.links(libraries) == {}
    assert layout.cache_entries("/l", libraries, 3) == [("libx.so.1", "/l/libx.so.1", 3)]


def test_names_that_ldconfig_ignores_are_not_library_names() -> None:
    assert not layout.is_library_name("nvidia_drv.so")
    assert not layout.is_library_name("libx.a")
    assert layout.is_library_name("ld-linux.so.2")
    assert layout.winners([("nvidia_drv.so", "nvidia_drv.so"), ("x", "libx.so.1")]) == {}


def test_development_links_of_known_libraries_get_cache_entries() -> None:
    libraries = [("libcuda.so.535.1", "libcuda.so.1"), ("libGLX_nvidia.so.5", "libGLX_nvidia.so.0")]
    links = ["libcuda.so", "libGLX_indirect.so.0", "libother.so"]
    keys = [key for key, _path, _flags in layout.cache_entries("/l", libraries, 3, links)]
    assert keys == ["libGLX_nvidia.so.0", "libcuda.so.1", "libcuda.so"]

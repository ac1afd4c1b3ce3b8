"""Where an image's loader looks, told by its files."""

import os
from pathlib import Path

import pytest

from gpuhook.ground.container.rootfs import Rootfs
from gpuhook.ground.loader import layout

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
def test_library_folder(
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
def test_folder_of_32_bit_libraries(
    tmp_path: Path, folders: list[str], links: dict[str, str], expected: str
) -> None:
    for name in folders:
        (tmp_path / name).mkdir(parents=True)
    for name, target in links.items():
        (tmp_path / name).symlink_to(target)
    with Rootfs(str(tmp_path)) as root:
        assert layout.of_image(root).libraries32 == expected

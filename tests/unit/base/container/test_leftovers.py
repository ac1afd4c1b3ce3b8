"""Names that an earlier start left in an image, and names that belong to the image."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuhook.base.container.changes import ContainerRootfs, Journal
from gpuhook.base.container.rootfs import Rootfs

GLX = ("/lib/libGLX_indirect.so.0", "libGLX_nvidia.so.580.1")
GBM = ("/lib/gbm/nvidia-drm_gbm.so", "../libnvidia-allocator.so.1")
SMI = ("/usr/bin/nvidia-smi", "/usr/lib/wsl/drivers/new/nvidia-smi")
EMPTY = ""

Files = dict[str, str]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for folder in ("lib/gbm", "usr/bin", "usr/lib/wsl/drivers/new", "etc"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("lib/libGLX_nvidia.so.580.1", "lib/libnvidia-allocator.so.580.1"):
        (tmp_path / name).write_text("580")
    (tmp_path / "lib/libnvidia-allocator.so.1").symlink_to("libnvidia-allocator.so.580.1")
    (tmp_path / "usr/lib/wsl/drivers/new/nvidia-smi").write_text("new")
    return tmp_path


def fill(root: Path, files: Files, links: Files) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    for name, target in links.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).symlink_to(target)


# The link, the files and links in the image, and whether the link's place has a leftover:
# first with renewed=False, then with renewed=True, where links to another version count, too.
CASES: list[tuple[tuple[str, str], Files, Files, bool, bool]] = [
    (GLX, {}, {"lib/libGLX_indirect.so.0": "libGLX_nvidia.so.570.1"}, True, True),
    (GLX, {"lib/libGLX_nvidia.so.570.1": EMPTY},
     {"lib/libGLX_indirect.so.0": "libGLX_nvidia.so.570.1"}, True, True),
    (GLX, {"lib/libGLX_nvidia.so.570.1": "570"},
     {"lib/libGLX_indirect.so.0": "libGLX_nvidia.so.570.1"}, False, True),
    (GLX, {}, {"lib/libGLX_indirect.so.0": "/opt/gone/libGLX_nvidia.so.0"}, True, True),
    (GLX, {}, {"lib/libGLX_indirect.so.0": "/etc/one", "etc/one": "two",
               "etc/two": "/lib/libGLX_nvidia.so.470"}, True, True),
    (GLX, {}, {"lib/libGLX_indirect.so.0": "libGLX_nvidia.so.0",
               "lib/libGLX_nvidia.so.0": "libGLX_nvidia.so.580.1"}, False, False),
    (GLX, {"lib/libGLX_indirect.so.0": EMPTY}, {}, True, True),
    (GLX, {"lib/libGLX_indirect.so.0": "a library"}, {}, False, False),
    (GLX, {"lib/libGLX_mesa.so.0": "mesa"},
     {"lib/libGLX_indirect.so.0": "libGLX_mesa.so.0"}, False, False),
    (GLX, {}, {"lib/libGLX_indirect.so.0": "libGLX_mesa.so.0"}, False, False),
    (GLX, {}, {"lib/libGLX_indirect.so.0": "libGLX_indirect.so.0"}, False, False),
    (GLX, {}, {}, False, False),
    (GBM, {}, {"lib/gbm/nvidia-drm_gbm.so": "../libnvidia-allocator.so.535"}, True, True),
    (GBM, {"lib/libnvidia-allocator.so.9": "9"},
     {"lib/gbm/nvidia-drm_gbm.so": "/lib/libnvidia-allocator.so.9"}, False, True),
    (GBM, {"lib/dri_gbm.so": "mesa"},
     {"lib/gbm/nvidia-drm_gbm.so": "../dri_gbm.so"}, False, False),
    (SMI, {}, {"usr/bin/nvidia-smi": "/usr/lib/wsl/drivers/old/nvidia-smi"}, True, True),
    (SMI, {"usr/lib/wsl/drivers/old/nvidia-smi": EMPTY},
     {"usr/bin/nvidia-smi": "/usr/lib/wsl/drivers/old/nvidia-smi"}, True, True),
    (SMI, {"usr/bin/wrapper": "#!/bin/sh"}, {"usr/bin/nvidia-smi": "wrapper"}, False, False),
]  # fmt: skip


@pytest.mark.parametrize(("link", "files", "links", "left", "renewed"), CASES)
def test_leftovers_of_an_earlier_start_are_recognized(
    root: Path, link: tuple[str, str], files: Files, links: Files, left: bool, renewed: bool
) -> None:
    fill(root, files, links)
    with Rootfs(str(root)) as image:
        assert image.is_leftover(*link, renewed=False) == left
        assert image.is_leftover(*link, renewed=True) == renewed


@pytest.fixture
def container(root: Path) -> Iterator[ContainerRootfs]:
    fd = os.open(root, os.O_PATH | os.O_DIRECTORY)
    with ContainerRootfs(fd, str(root), Journal()) as found:
        yield found


def tree(root: Path) -> dict[str, str]:
    return {
        str(path.relative_to(root)): f"-> {path.readlink()}" if path.is_symlink() else
        ("" if path.is_dir() else path.read_text())
        for path in root.rglob("*")
    }  # fmt: skip


@pytest.mark.parametrize(("link", "files", "links", "left", "renewed"), CASES)
def test_leftovers_are_replaced_and_restored_on_rollback(
    container: ContainerRootfs, root: Path, link: tuple[str, str], files: Files, links: Files,
    left: bool, renewed: bool,
) -> None:  # fmt: skip
    fill(root, files, links)
    before, place = tree(root), link[0].lstrip("/")
    container.make_link(*link, replace=False, renewed=True)
    after = tree(root)
    is_ours = after[place] == f"-> {link[1]}"
    assert is_ours == (renewed or place not in before)
    assert {name: text for name, text in after.items() if name != place} == {
        name: text for name, text in before.items() if name != place
    }
    assert container.journal.roll_back() == []
    assert tree(root) == before


def test_a_link_to_a_missing_target_does_not_replace_the_images(
    container: ContainerRootfs, root: Path
) -> None:
    """A volume without a place for the driver's library keeps the image's own library."""
    (root / "lib/libGLX_indirect.so.0").symlink_to("libGLX_nvidia.so.570.1")
    container.make_link(GLX[0], "libGLX_nvidia.so.999", replace=False, renewed=True)
    assert os.readlink(root / "lib/libGLX_indirect.so.0") == "libGLX_nvidia.so.570.1"


NAMES = st.text("abc./", min_size=1, max_size=12)


@given(st.lists(st.tuples(NAMES, NAMES), max_size=6), NAMES, NAMES)
def test_image_links_never_cause_a_failure(
    tmp_path_factory: pytest.TempPathFactory,
    links: list[tuple[str, str]],
    path: str,
    target: str,
) -> None:
    root = tmp_path_factory.mktemp("image")
    for name, to in links:
        place = root / os.path.normpath(f"/{name}").lstrip("/")
        if place != root and not os.path.lexists(place) and place.parent.is_dir():
            place.symlink_to(to)
    with Rootfs(str(root)) as image:
        answer = image.is_leftover(f"/{path}", target, renewed=True)
        assert answer in (True, False)

"""The real loader in two layouts of root filesystems, which finds libraries by merged caches."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.commands import run

from gpuhook.base.loader import layout, ldcache

HOST_LIBRARY = Path("/lib/x86_64-linux-gnu/libz.so.1")

# The driver's folder, which only the loader's cache names. The root has a libz.so.1 of its own.
FOLDER = "/opt/gpu"
FILES: list[tuple[str, str | None]] = [
    ("libz.so.1.9", "libz.so.1"),
    ("libq.so.535.309.01", "libq.so.1"),
]
NAMES = ["libq.so.1", "libz.so.1", "libm.so.6", "libabsent.so.1"]


def make_root(source: Path, root: Path) -> None:
    """Copy a root, and put the driver's files next to the root's own libraries."""
    run(["cp", "-a", source, root]).ok()
    content = HOST_LIBRARY.read_bytes()
    assert content.count(b"libz.so.1\0") == 1
    multiarch = root / "usr/lib/x86_64-linux-gnu"
    own = multiarch if multiarch.is_dir() else root / "usr/lib64"
    (own / "libz.so.1").write_bytes(content)
    gpu = root / FOLDER[1:]
    gpu.mkdir(parents=True)
    for name, soname in FILES:
        (gpu / name).write_bytes(content.replace(b"libz.so.1\0", f"{soname}\0".encode()))


def merge(root: Path) -> None:
    """Do the same as gpuhook: create links next to the libraries, and entries in the cache."""
    for link, target in layout.links(FILES).items():
        (root / FOLDER[1:] / link).symlink_to(target)
    flags = layout.cache_flags(os.uname().machine, bits32=False)
    assert flags is not None
    cache = root / "etc/ld.so.cache"
    old = cache.read_bytes() if cache.exists() else None
    cache.write_bytes(ldcache.merge(old, layout.cache_entries(FOLDER, FILES, flags)))


def found(root: Path) -> dict[str, str]:
    """Return the path that dlopen finds in the root for each bare name, or "-"."""
    result = run(["chroot", root, "/usr/local/bin/dlprobe", *NAMES])
    return {line.split()[0]: line.split()[1] for line in result.stdout.splitlines()}


@pytest.fixture(params=["debian", "lib64"])
def root(request: pytest.FixtureRequest, roots: dict[str, Path], tmp_path: Path) -> Iterator[Path]:
    copy = tmp_path / "root"
    make_root(roots[request.param], copy)
    yield copy
    shutil.rmtree(copy)


@pytest.mark.parametrize("form", ["new", "compat", "old"])
def test_the_loader_finds_the_driver_and_the_images_libraries(root: Path, form: str) -> None:
    run(["ldconfig", "-r", root, "-c", form]).ok()
    before = found(root)
    assert before["libq.so.1"] == before["libabsent.so.1"] == "-"
    assert before["libz.so.1"].endswith("/libz.so.1")
    merge(root)
    driver = {"libq.so.1": f"{FOLDER}/libq.so.535.309.01", "libz.so.1": f"{FOLDER}/libz.so.1.9"}
    assert found(root) == before | driver


def test_the_loader_finds_the_same_as_after_a_full_ldconfig(root: Path) -> None:
    run(["ldconfig", "-r", root]).ok()
    merge(root)
    merged = found(root)
    for link in layout.links(FILES):
        (root / FOLDER[1:] / link).unlink()
    (root / "etc/ld.so.cache").unlink()
    run(["ldconfig", "-r", root, FOLDER]).ok()
    assert found(root) == merged


def test_in_an_image_without_a_cache_the_loader_finds_the_driver(
    roots: dict[str, Path], tmp_path: Path
) -> None:
    root = tmp_path / "root"
    make_root(roots["debian"], root)
    try:
        (root / "etc/ld.so.cache").unlink()
        before = found(root)
        merge(root)
        driver = {"libq.so.1": f"{FOLDER}/libq.so.535.309.01", "libz.so.1": f"{FOLDER}/libz.so.1.9"}
        assert found(root) == before | driver
        assert before["libm.so.6"] != "-"
    finally:
        shutil.rmtree(root)

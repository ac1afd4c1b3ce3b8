"""simulate's driver files: real packages' files in their places, with Debian's links."""

import os
from pathlib import Path

import pytest

from gpuhook.base.errors import SimulateError
from gpuhook_simulate.tree import Tree
from gpuhook_simulate.vendors.nvidia.vendor_files import (
    VendorFiles,
    find_vendor_files,
    install_vendor_files,
    public_library_dirs,
)

TRIPLET = f"{os.uname().machine}-linux-gnu"
VERSION = "535.309.01"
PRIVATE = f"usr/lib/{TRIPLET}/nvidia/current"

DEBIAN = {
    f"{PRIVATE}/libcuda.so.{VERSION}": "real cuda",
    f"{PRIVATE}/libcuda.so.1": f"-> libcuda.so.{VERSION}",
    f"{PRIVATE}/libnvidia-ml.so.{VERSION}": "real nvml",
    f"{PRIVATE}/libnvidia-ml.so.1": f"-> libnvidia-ml.so.{VERSION}",
    f"{PRIVATE}/libnvidia-cfg.so.{VERSION}": "cfg",
    f"{PRIVATE}/libnvidia-cfg.so.1": f"-> libnvidia-cfg.so.{VERSION}",
    f"{PRIVATE}/libGLX_nvidia.so.0": "glx",
    f"{PRIVATE}/libvdpau_nvidia.so.1": "vdpau",
    f"usr/lib/{TRIPLET}/libnvidia-tls.so.{VERSION}": "tls",
    "usr/lib/other-linux-gnu/nvidia/current/libcuda.so.1": "for another machine",
    "usr/lib/nvidia/current/nvidia-smi": "smi",
    "usr/share/doc/libcuda1/copyright": "words",
    f"lib/firmware/nvidia/{VERSION}/gsp_ga10x.bin": "firmware",
    ".note": "not a package's",
}


def make_source(folder: Path, files: dict[str, str]) -> str:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content.startswith("-> "):
            path.symlink_to(content[3:])
        else:
            path.write_text(content)
    return str(folder)


def follow(root: Path, path: str) -> str:
    """Return the content of a path below the root, with absolute links resolved inside it."""
    for _ in range(8):
        full = root / path.lstrip("/")
        if not full.is_symlink():
            return full.read_text()
        path = os.path.normpath(os.path.join(os.path.dirname(path), os.readlink(full)))
    raise AssertionError(path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root with the driver's files, in the folders that build creates before them."""
    root = tmp_path / "root"
    (root / "usr/lib").mkdir(parents=True)
    (root / "lib").symlink_to("usr/lib")
    source = make_source(tmp_path / "source", DEBIAN)
    install_vendor_files(Tree(str(root)), find_vendor_files(source))
    return root


def test_driver_files_are_found_in_debians_private_folder(tmp_path: Path) -> None:
    source = make_source(tmp_path, DEBIAN)
    assert find_vendor_files(source) == VendorFiles(source, VERSION, f"/{PRIVATE}")


def test_driver_files_are_found_in_the_library_folder_itself(tmp_path: Path) -> None:
    source = make_source(tmp_path, {f"usr/lib64/libcuda.so.{VERSION}": ""})
    assert find_vendor_files(source).library_dir == "/usr/lib64"


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, r"There is no libcuda.so.VERSION"),
        ({"usr/lib/other-linux-gnu/libcuda.so.535.1": ""}, r"There is no libcuda.so.VERSION"),
        ({f"{PRIVATE}/libcuda.so.1": ""}, r"There is no libcuda.so.VERSION"),
        (
            {f"{PRIVATE}/libcuda.so.535.1": "", f"{PRIVATE}/libcuda.so.470.1": ""},
            r"more than one driver below .*: 470\.1, .*: 535\.1",
        ),
    ],
)
def test_a_source_without_exactly_one_driver_is_refused(
    tmp_path: Path, files: dict[str, str], words: str
) -> None:
    with pytest.raises(SimulateError, match=words):
        find_vendor_files(make_source(tmp_path, files))


def test_driver_files_keep_their_paths(root: Path) -> None:
    assert (root / f"{PRIVATE}/libnvidia-cfg.so.{VERSION}").read_text() == "cfg"
    assert (root / f"usr/lib/firmware/nvidia/{VERSION}/gsp_ga10x.bin").read_text() == "firmware"
    assert not (root / ".note").exists()
    assert not (root / "usr/share/doc").exists()


def test_the_simulated_libraries_are_not_copied(root: Path) -> None:
    assert not (root / f"{PRIVATE}/libcuda.so.{VERSION}").exists()
    assert not (root / f"{PRIVATE}/libnvidia-ml.so.{VERSION}").exists()
    assert (root / f"{PRIVATE}/libcuda.so.1").is_symlink()


def test_debian_links_are_made_for_existing_files_only(root: Path) -> None:
    library_dir = f"usr/lib/{TRIPLET}"
    assert follow(root, f"/{library_dir}/libGLX_nvidia.so.0") == "glx"
    assert follow(root, f"/{library_dir}/libGLX_indirect.so.0") == "glx"
    assert follow(root, f"/{library_dir}/libnvidia-cfg.so.1") == "cfg"
    assert follow(root, f"/{library_dir}/vdpau/libvdpau_nvidia.so.1") == "vdpau"
    assert follow(root, "/usr/bin/nvidia-smi") == "smi"
    assert follow(root, "/usr/lib/other-linux-gnu/libcuda.so.1") == "for another machine"
    alternative = f"/etc/alternatives/nvidia--libGLX_nvidia.so.0-{TRIPLET}"
    assert os.readlink(root / library_dir / "libGLX_nvidia.so.0") == alternative
    assert os.readlink(root / "usr/bin/nvidia-smi") == "/etc/alternatives/nvidia--nvidia-smi"
    # Files that the packages don't have get no links.
    assert not os.path.lexists(root / library_dir / "libnvidia-encode.so.1")
    assert not os.path.lexists(root / "usr/bin/nvidia-debugdump")


def test_loader_folders_are_the_public_library_folders(root: Path, tmp_path: Path) -> None:
    files = find_vendor_files(str(tmp_path / "source"))
    folders = public_library_dirs(Tree(str(root)), files)
    assert folders == [f"/usr/lib/{TRIPLET}", "/usr/lib/other-linux-gnu"]


def test_writing_into_the_simulated_root_leaves_the_source_unchanged(
    root: Path, tmp_path: Path
) -> None:
    name = f"{PRIVATE}/libnvidia-cfg.so.{VERSION}"
    assert os.path.samefile(root / name, tmp_path / "source" / name)
    Tree(str(root)).text(name, "ours")
    assert (tmp_path / "source" / name).read_text() == "cfg"

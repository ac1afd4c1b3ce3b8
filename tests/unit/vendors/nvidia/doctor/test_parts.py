"""The check of the driver's files: missing, unlisted, and outside the searched folders."""

import pytest
from fabricated import LIBRARIES, VERSION, Tree, said

from gpuhook.tools.doctor.finding import Finding
from gpuhook.tools.vendors.nvidia.doctor import parts

ICD = "vulkan/icd.d/nvidia_icd.json"
EGL = "glvnd/egl_vendor.d/10_nvidia.json"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin")
    monkeypatch.delenv("XDG_DATA_DIRS", raising=False)


def found(tree: Tree) -> Finding:
    [finding] = parts.driver_complete(tree.case)
    assert finding.check == "driver-files"
    return finding


def graphics(tree: Tree) -> None:
    """Install graphics libraries without manifests."""
    for name in ("libGLX_nvidia.so", "libEGL_nvidia.so"):
        tree.write(f"{LIBRARIES}/{name}.{VERSION}", tree._library(f"{name}.0"))


def test_missing_driver_files_are_reported_with_a_remedy(tree: Tree) -> None:
    tree.driver()
    assert said(parts.driver_complete(tree.case))["driver-files"][0] == "ok"
    (tree.root / LIBRARIES / f"libnvidia-ptxjitcompiler.so.{VERSION}").unlink()
    (tree.root / "usr/bin/nvidia-smi").unlink()
    status, message = said(parts.driver_complete(tree.case))["driver-files"]
    assert status == "warning"
    assert message == "compute lacks libnvidia-ptxjitcompiler; utility lacks nvidia-smi"
    assert found(tree).remedy.startswith("Install the rest of the driver's libraries and programs")
    (tree.root / LIBRARIES / f"libcuda.so.{VERSION}").unlink()
    finding = found(tree)
    assert finding.status == "failure"
    assert finding.message.startswith(f"libcuda.so.{VERSION} isn't installed")
    assert f"exactly version {VERSION} (libcuda1 on Debian" in finding.remedy


def test_unlisted_driver_libraries_are_named(tree: Tree) -> None:
    tree.driver()
    for name in ("libnvidia-sandboxutils.so", "libnvidia-of-2031.so"):
        tree.write(f"{LIBRARIES}/{name}.{VERSION}", tree._library(f"{name}.1"))
    message = found(tree).message
    assert message.endswith(
        "; with all capabilities also libnvidia-of-2031, libnvidia-sandboxutils"
    )


def test_graphics_libraries_without_manifests_give_a_warning(tree: Tree) -> None:
    tree.driver()
    graphics(tree)
    finding = found(tree)
    assert finding.status == "warning"
    assert f"there is no manifest {ICD}" in finding.message
    assert f"there is no manifest {EGL}" in finding.message
    tree.write(f"/usr/share/{ICD}", "{}")
    tree.write(f"/run/opengl-driver/share/{EGL}", "{}")
    assert found(tree).status == "ok"


def test_the_remedy_names_the_path_folder_with_the_missing_program(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree.driver()
    (tree.root / "usr/bin/nvidia-smi").unlink()
    tree.program("/srv/driver/bin/nvidia-smi")
    tree.program("/srv/nothing/bin/other")
    monkeypatch.setenv("PATH", "/usr/bin:/srv/nothing/bin::relative:/srv/driver/bin/:/nowhere")
    finding = found(tree)
    assert finding.message == "utility lacks nvidia-smi"
    command = "Run gpuhook config set gpuhook.binary-search-paths="
    assert finding.remedy == f"{command}/srv/driver/bin"
    tree.config.binary_search_paths = ("/srv/nothing/bin",)
    assert found(tree).remedy == f"{command}/srv/nothing/bin:/srv/driver/bin"
    tree.config.binary_search_paths = ("/srv/driver/bin",)
    assert found(tree).status == "ok"


def test_the_remedy_names_the_xdg_data_folder_with_the_manifests(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree.driver()
    graphics(tree)
    for name in (ICD, EGL):
        tree.write(f"/srv/driver/share/{name}", "{}")
    monkeypatch.setenv("XDG_DATA_DIRS", "/usr/share:/srv/driver/share")
    remedy = "Run gpuhook config set gpuhook.data-search-paths=/srv/driver/share"
    assert found(tree).remedy == remedy
    tree.config.data_search_paths = ("/srv/driver/share",)
    assert found(tree).status == "ok"


def test_folders_writable_by_others_are_not_proposed(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree.driver()
    (tree.root / "usr/bin/nvidia-smi").unlink()
    tree.program("/home/user/bin/nvidia-smi")
    (tree.root / "home/user/bin").chmod(0o777)
    monkeypatch.setenv("PATH", "/home/user/bin")
    assert found(tree).remedy.startswith("Install the rest")


def test_a_configured_folder_writable_by_others_causes_a_warning(tree: Tree) -> None:
    tree.driver()
    tree.write("/srv/share/vulkan/icd.d/nvidia_icd.json", "{}")
    (tree.root / "srv/share").chmod(0o777)
    tree.config.data_search_paths = ("/srv/share",)
    first, second = parts.driver_complete(tree.case)
    assert (first.check, str(first.status)) == ("driver-folders", "warning")
    assert "'/srv/share', which non-root users may change" in first.message
    assert second.status == "ok"

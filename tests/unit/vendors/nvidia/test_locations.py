"""locations: distributions' folders of programs and shared data, and the folders' owners."""

import os
from pathlib import Path

import pytest
from driver_tree import LIBS, Root, targets

from gpuhook.base.config.model import Config
from gpuhook.base.container.rootfs import Rootfs
from gpuhook.core.inventory import fingerprint
from gpuhook.vendors.nvidia import driver_files, locations, manifests

ELF = b"\x7fELF and so on"
SMI = "/usr/bin/nvidia-smi"
PROGRAMS = [
    "opt/bin",
    "usr/local/nvidia/bin",
    "var/lib/nvidia/bin",
    "run/opengl-driver/bin",
    "run/current-system/sw/bin",
    "usr/libexec/nvidia",
    "usr/libexec/nvidia/tesla/bin",
    "usr/libexec/nvidia/r580/tesla/bin",
]
DATA = [
    "etc",
    "usr/local/share",
    "usr/share",
    "usr/local/nvidia",
    "usr/local/nvidia/share",
    "var/lib/nvidia",
    "run/opengl-driver/share",
    "run/opengl-driver-32/share",
    "run/current-system/sw/share",
    "share",
    "",
]


@pytest.mark.parametrize("folder", PROGRAMS)
def test_programs_are_found_in_every_distributions_folder(root: Root, folder: str) -> None:
    root.put(f"{folder}/nvidia-smi", ELF)
    assert targets(root.find()) == {SMI: f"/{folder}/nvidia-smi"}


@pytest.mark.parametrize("folder", DATA)
def test_manifests_are_found_in_every_distributions_folder(root: Root, folder: str) -> None:
    root.put(f"{folder}/vulkan/icd.d/nvidia_icd.json", "{}")
    icd = {"/etc/vulkan/icd.d/nvidia_icd.json": f"/{folder}/vulkan/icd.d/nvidia_icd.json"}
    assert targets(root.find()) == {name: path.replace("//", "/") for name, path in icd.items()}


@pytest.mark.parametrize(
    "folder", ["run/opengl-driver/lib", "var/lib/nvidia/lib64", "usr/local/nvidia/lib64"]
)
def test_libraries_are_found_in_every_distributions_folder(root: Root, folder: str) -> None:
    root.add("libnvidia-ml.so", "libnvidia-ml.so.1", folder)
    assert root.nvml() == f"/{folder}/libnvidia-ml.so.{root.version}"
    assert [file.path for file in root.find()] == [root.nvml()]


def test_a_driver_in_the_nixos_store_is_found(root: Root) -> None:
    """On NixOS, every path is a link into the Nix store."""
    store = "nix/store/1x5g-nvidia-x11-595.45.04"
    root.version = "595.45.04"
    for name, soname in {"libcuda": "1", "libnvidia-ml": "1", "libGLX_nvidia": "0"}.items():
        root.add(f"{name}.so", f"{name}.so.{soname}", f"{store}/lib")
        link = f"run/opengl-driver/lib/{name}.so.{soname}"
        root.link(link, f"/{store}/lib/{name}.so.{soname}")
    root.put(f"{store}-bin/bin/nvidia-smi", ELF)
    root.link("run/current-system/sw/bin/nvidia-smi", f"/{store}-bin/bin/nvidia-smi")
    icd = f'{{"ICD": {{"library_path": "/{store}/lib/libGLX_nvidia.so.0"}}}}'
    root.put(f"{store}/share/vulkan/icd.d/nvidia_icd.x86_64.json", icd)
    root.link("run/opengl-driver/share", f"/{store}/share")
    found = targets(root.find())
    manifest = "/etc/vulkan/icd.d/nvidia_icd.x86_64.json"
    assert {SMI, manifest, "libcuda.so.595.45.04", "libnvidia-ml.so.595.45.04"} < set(found)
    assert found[manifest] == f"/{store}/share/vulkan/icd.d/nvidia_icd.x86_64.json"
    [text] = [file.content for file in root.find() if file.target == manifest]
    assert text == '{"ICD":{"library_path":"libGLX_nvidia.so.0"}}\n'


def test_programs_of_the_running_drivers_branch_are_preferred(root: Root) -> None:
    for branch in ("r470", "535", "580"):
        root.put(f"usr/libexec/nvidia/{branch}/tesla/bin/nvidia-smi", ELF)
    for version, branch in {"580.65.06": "580", "535.261.03": "535", "595.45": "535"}.items():
        root.version = version
        path = f"/usr/libexec/nvidia/{branch}/tesla/bin/nvidia-smi"
        assert targets(root.find()) == {SMI: path}, version


def test_deep_or_large_program_folders_are_not_searched(root: Root) -> None:
    deep = "usr/libexec/nvidia/" + "/".join("abcdefgh")
    root.put(f"{deep}/nvidia-smi", ELF)
    for number in range(300):
        (root.path / "usr/libexec/nvidia" / f"n{number}").mkdir()
    assert root.find() == ()


# What config.toml names --------------------------------------------------------------------------


def test_configured_folders_take_precedence(root: Root) -> None:
    root.config.binary_search_paths = ("/srv/a/bin", "/srv/b/bin")
    root.config.data_search_paths = ("/srv/a/share",)
    for folder in ("usr/bin", "srv/b/bin"):
        root.put(f"{folder}/nvidia-smi", ELF)
        root.put(f"{folder}/nvidia-debugdump", ELF)
    root.put("srv/a/bin/nvidia-smi", ELF)
    for folder in ("usr/share", "srv/a/share"):
        root.put(f"{folder}/glvnd/egl_vendor.d/10_nvidia.json", folder)
    root.put("usr/share/nvidia/nvoptix.bin")
    assert targets(root.find()) == {
        SMI: "/srv/a/bin/nvidia-smi",
        "/usr/bin/nvidia-debugdump": "/srv/b/bin/nvidia-debugdump",
        "/usr/share/glvnd/egl_vendor.d/10_nvidia.json": (
            "/srv/a/share/glvnd/egl_vendor.d/10_nvidia.json"
        ),
        "/usr/share/nvidia/nvoptix.bin": "/usr/share/nvidia/nvoptix.bin",
    }
    assert root.refused() == []


def test_a_missing_configured_folder_is_no_error(root: Root) -> None:
    root.config.binary_search_paths = root.config.data_search_paths = ("/nowhere",)
    assert (root.find(), root.refused()) == ((), [])


# Whose folders -----------------------------------------------------------------------------------


@pytest.mark.protects(
    "configured-folders",
    "driver folders named in config.toml are used only if other users can't change them",
    instead="found.setdefault(self._root.real_path(folder), folder)",
)
@pytest.mark.parametrize("setting", ["binary-search-paths", "data-search-paths"])
@pytest.mark.parametrize("above", [True, False])
def test_configured_folders_writable_by_others_are_refused(
    root: Root, setting: str, above: bool
) -> None:
    setattr(root.config, setting.replace("-", "_"), ("/srv/driver/files",))
    root.put("srv/driver/files/nvidia-smi", ELF)
    root.put("srv/driver/files/vulkan/icd.d/nvidia_icd.json", "{}")
    open_one = root.path / ("srv/driver" if above else "srv/driver/files")
    assert len(root.find()) == 1
    open_one.chmod(0o777)
    assert root.find() == ()
    [text] = root.refused()
    assert text == (
        f"{setting} names '/srv/driver/files', which non-root users may change: containers "
        "get nothing from there"
    )


@pytest.mark.protects(
    "driver-folders",
    "driver programs and manifests come only from folders that other users can't change",
    instead='return self._root.real_path(folder or "/")',
    also=("driver-way", "return self._root.real_path(path)"),
)
@pytest.mark.protects(
    "configured-folders",
    "driver folders named in config.toml are used only if other users can't change them",
    instead="found.setdefault(self._root.real_path(folder), folder)",
)
@pytest.mark.parametrize("folder", ["opt/bin", "usr/libexec/nvidia/bin", "run/opengl-driver/bin"])
def test_default_folders_writable_by_others_are_skipped(root: Root, folder: str) -> None:
    root.put(f"{folder}/nvidia-smi", ELF)
    (root.path / folder).chmod(0o777)
    assert (root.find(), root.refused()) == ((), [])
    root.put("usr/bin/nvidia-smi", ELF)
    assert targets(root.find()) == {SMI: SMI}


@pytest.mark.protects(
    "driver-way",
    "links through another user's folder to driver files aren't followed",
    instead="return self._root.real_path(path)",
)
def test_links_through_a_folder_writable_by_others_are_not_followed(root: Root) -> None:
    root.put("home/user/nvidia-smi", ELF)
    root.put("home/user/nvidia_icd.json", "{}")
    (root.path / "home/user").chmod(0o777)
    root.link("opt/bin/nvidia-smi", "/home/user/nvidia-smi")
    root.link("usr/share/vulkan/icd.d/nvidia_icd.json", "/home/user/nvidia_icd.json")
    root.link("usr/share/glvnd", "/home/user")
    assert root.find() == ()


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to another user")
@pytest.mark.parametrize("setting", ["binary_search_paths", "data_search_paths"])
def test_configured_folders_of_another_user_are_refused(root: Root, setting: str) -> None:
    setattr(root.config, setting, ("/srv/files",))
    root.put("srv/files/nvidia-smi", ELF)
    root.put("srv/files/vulkan/icd.d/nvidia_icd.json", "{}")
    os.chown(root.path / "srv/files", 12345, 12345)
    assert root.find() == ()
    assert len(root.refused()) == 1


# What makes an inventory stale -------------------------------------------------------------------


def test_every_search_folder_is_watched_for_changes(root: Root) -> None:
    """A new file there is in ``volatile_paths``, or below a watched folder."""
    config = root.config
    config.binary_search_paths, config.data_search_paths = ("/srv/bin",), ("/srv/share",)
    volatile = set(driver_files.volatile_paths(config))
    for folder in (*locations._PROGRAMS, "/srv/bin"):
        assert f"{folder}/nvidia-smi" in volatile
    for folder in (*locations.data_folders(config), "/srv/share"):
        assert f"{folder}/vulkan/icd.d" in volatile
    watched = driver_files.watched_paths(config)
    assert set(watched) <= volatile
    assert set(manifests.folders(config)) <= set(watched)


def test_a_separate_driver_root_has_more_data_folders() -> None:
    own, other = Config(), Config()
    other.driver_root = "/run/nvidia/driver"
    assert "/share" not in locations.data_folders(own)
    assert {"/share", ""} < set(locations.data_folders(other))


def test_missing_path_components_are_listed_once(tmp_path: Path) -> None:
    for folder in ("usr/bin", "opt", "etc"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "bin").symlink_to("usr/bin")
    paths = [
        "/usr/bin/a", "/bin/a", "/bin/b", "/opt/bin/a", "/opt/bin/b", "/etc/x/y/z", "/etc/x/w",
        "/nowhere/x/y", "/nowhere/z", "/usr/bin",
    ]  # fmt: skip
    assert fingerprint.absent(str(tmp_path), paths) == [
        "/usr/bin/a", "/bin/b", "/opt/bin", "/etc/x", "/nowhere/x", "/nowhere/z",
    ]  # fmt: skip


@pytest.mark.protects(
    "watched-folders", "other users can't cause the driver to be queried at every container start"
)
def test_folders_writable_by_others_are_not_watched(root: Root) -> None:
    """A user who may write to such a folder could cause a query of the driver at every start."""
    root.put("usr/share/vulkan/icd.d/a.json")
    root.put("srv/vulkan/icd.d/a.json")
    paths = ["/usr/share/vulkan/icd.d", "/srv/vulkan/icd.d", "/nowhere", "/srv/vulkan/icd.d/a.json"]
    assert set(fingerprint.watched(str(root.path), paths)) == {*paths} - {"/nowhere"}
    (root.path / "srv/vulkan/icd.d").chmod(0o777)
    assert set(fingerprint.watched(str(root.path), paths)) == {paths[0]}
    assert fingerprint.watched(str(root.path / "nowhere"), paths) == {}


def test_a_dangling_folder_link_is_ignored(root: Root) -> None:
    root.link("run/opengl-driver", "/nix/store/gone")
    root.add("libcuda.so", "libcuda.so.1", LIBS)
    with Rootfs(str(root.path)) as below:
        found = locations.Locations(below)
    assert found.programs == found.trees == found.refused == []
    assert len(root.find()) == 1

"""driver_files, graphics_files: discovery of files below a driver root."""

import os
from collections.abc import Callable
from types import SimpleNamespace

import own
import pytest
from driver_tree import LIBS, VERSION, Root, targets

from gpuhook.base.errors import DriverError, LdCacheError
from gpuhook.vendors.nvidia.model import EVERYTHING


def test_libraries_are_found_through_the_loader_cache(root: Root) -> None:
    root.add("libcuda.so", "libcuda.so.1")
    root.add("libnvidia-ml.so", "libnvidia-ml.so.1")
    root.make_cache()
    found = root.find("/nowhere")
    assert targets(found) == {
        f"libcuda.so.{VERSION}": f"/{LIBS}/libcuda.so.{VERSION}",
        f"libnvidia-ml.so.{VERSION}": f"/{LIBS}/libnvidia-ml.so.{VERSION}",
    }
    assert {file.soname for file in found} == {"libcuda.so.1", "libnvidia-ml.so.1"}
    assert root.nvml() == f"/{LIBS}/libnvidia-ml.so.{VERSION}"


def test_debians_alternatives_are_followed_inside_the_root(root: Root) -> None:
    current = f"{LIBS}/nvidia/current"
    root.add("libcuda.so", "libcuda.so.1", current)
    root.link(f"{LIBS}/libcuda.so.1", "/etc/alternatives/nvidia--libcuda.so.1")
    root.link("etc/alternatives/nvidia--libcuda.so.1", f"/{current}/libcuda.so.1")
    root.make_cache()
    found = targets(root.find("/nowhere"))
    assert found == {f"libcuda.so.{VERSION}": f"/{current}/libcuda.so.{VERSION}"}


def test_without_a_cache_configured_folders_precede_the_usual_ones(root: Root) -> None:
    root.add("libcuda.so", "libcuda.so.1", "opt/nvidia/lib64")
    assert targets(root.find()) == {}
    found = {f"libcuda.so.{VERSION}": f"/opt/nvidia/lib64/libcuda.so.{VERSION}"}
    assert targets(root.find("/opt/nvidia/lib64")) == found
    root.add("libcuda.so", "libcuda.so.1")
    root.add("libnvidia-ml.so", "libnvidia-ml.so.1")
    usual = {f"libnvidia-ml.so.{VERSION}": f"/{LIBS}/libnvidia-ml.so.{VERSION}"}
    assert targets(root.find("/opt/nvidia/lib64")) == found | usual
    assert targets(root.find())[f"libcuda.so.{VERSION}"] == f"/{LIBS}/libcuda.so.{VERSION}"


def test_libraries_of_another_driver_version_are_ignored(root: Root) -> None:
    root.add("libcuda.so", "libcuda.so.1", version="470.1.1")
    root.make_cache()
    assert root.find() == ()


def test_similar_names_are_not_confused(root: Root) -> None:
    root.add_file(f"{LIBS}/libnvidia-nvvm70.so.4")
    root.add("libnvidia-nvvm.so", "libnvidia-nvvm.so.4")
    root.make_cache()
    found = targets(root.find())
    assert {name: path.rpartition("/")[2] for name, path in found.items()} == {
        name: name for name in (f"libnvidia-nvvm.so.{VERSION}", "libnvidia-nvvm70.so.4")
    }


def test_a_damaged_library_is_ignored(root: Root) -> None:
    root.add("libcuda.so", "libcuda.so.1")
    root.put(f"{LIBS}/libnvidia-ml.so.{VERSION}", b"\x7fELF damaged")
    root.make_cache()
    assert list(targets(root.find())) == [f"libcuda.so.{VERSION}"]


def test_a_damaged_loader_cache_is_an_error_with_its_path(root: Root) -> None:
    root.put("etc/ld.so.cache", b"glibc-ld.so.cache1.1" + b"\xff" * 40)
    with pytest.raises(LdCacheError, match=str(root.path)):
        root.find()


def test_32_bit_libraries_are_kept_apart(root: Root) -> None:
    folder32, (machine, flags) = own.FOLDER32[1:], own.ELF32
    root.add("libcuda.so", "libcuda.so.1")
    content = root.library("libcuda.so.1", bits=32, machine=machine, flags=flags)
    root.put(f"{folder32}/libcuda.so.{VERSION}", content)
    root.link(f"{folder32}/libcuda.so.1", f"libcuda.so.{VERSION}")
    root.make_cache(LIBS, folder32)
    kinds = {file.path: file.kind for file in root.find()}
    assert kinds == {
        f"/{LIBS}/libcuda.so.{VERSION}": "library",
        f"/{folder32}/libcuda.so.{VERSION}": "library32",
    }


def test_a_missing_driver_error_names_the_root_and_settings(root: Root) -> None:
    with pytest.raises(DriverError, match=str(root.path)) as caught:
        root.nvml()
    assert "[nvidia-container-cli] root" in caught.value.remedy
    assert "library-search-paths" in caught.value.remedy
    assert "/srv/gpuhook.toml" in caught.value.remedy


def test_programs_and_firmware_of_this_version_are_found(root: Root) -> None:
    root.put("usr/lib/nvidia/current/nvidia-smi")
    root.link("usr/bin/nvidia-smi", "/etc/alternatives/nvidia--nvidia-smi")
    root.link("etc/alternatives/nvidia--nvidia-smi", "/usr/lib/nvidia/current/nvidia-smi")
    root.put(f"usr/lib/firmware/nvidia/{VERSION}/gsp_ga10x.bin")
    root.put(f"usr/lib/firmware/nvidia/{VERSION}/notes.txt")
    root.put("usr/lib/firmware/nvidia/470.1/gsp.bin")
    root.link("lib", "usr/lib")
    assert targets(root.find()) == {
        "/usr/bin/nvidia-smi": "/usr/lib/nvidia/current/nvidia-smi",
        f"/lib/firmware/nvidia/{VERSION}/gsp_ga10x.bin": (
            f"/usr/lib/firmware/nvidia/{VERSION}/gsp_ga10x.bin"
        ),
    }


FOLDERS = ("usr/bin", "usr/sbin", "usr/local/bin", "usr/local/sbin", "usr/local/nvidia/bin")


@pytest.mark.parametrize("wrapper", FOLDERS)
@pytest.mark.parametrize("program", FOLDERS)
def test_a_driver_program_is_preferred_to_a_host_wrapper(
    root: Root, wrapper: str, program: str
) -> None:
    root.put(f"{wrapper}/nvidia-smi", b"#!/bin/sh\nexec /opt/driver/nvidia-smi")
    found = targets(root.find())
    assert found == {"/usr/bin/nvidia-smi": f"/{wrapper}/nvidia-smi"}, "it is all that there is"
    root.put(f"{program}/nvidia-smi", b"\x7fELF and so on")
    assert targets(root.find()) == {"/usr/bin/nvidia-smi": f"/{program}/nvidia-smi"}


@pytest.mark.parametrize("folder", ["lib64", "lib", f"lib/{LIBS.rpartition('/')[2]}"])
def test_a_driver_in_its_own_folder_is_found(root: Root, folder: str) -> None:
    root.add("libnvidia-ml.so", "libnvidia-ml.so.1", folder)
    root.put("bin/nvidia-smi", b"\x7fELF and so on")
    assert root.nvml() == f"/{folder}/libnvidia-ml.so.{VERSION}"
    assert set(targets(root.find())) == {f"libnvidia-ml.so.{VERSION}", "/usr/bin/nvidia-smi"}


def test_a_driver_outside_the_loaders_folders_is_found(root: Root) -> None:
    root.add("libnvidia-ml.so", "libnvidia-ml.so.1", "usr/local/nvidia/lib64")
    root.make_cache()
    assert root.nvml() == f"/usr/local/nvidia/lib64/libnvidia-ml.so.{VERSION}"


@pytest.mark.parametrize("first", range(5))
def test_firmware_is_searched_in_the_kernels_order(root: Root, first: int) -> None:
    root.put("sys/module/firmware_class/parameters/path", b"/opt/driver/firmware/\n")
    places = ["opt/driver/firmware", f"lib/firmware/updates/{os.uname().release}"]
    places += ["lib/firmware/updates", f"lib/firmware/{os.uname().release}", "lib/firmware"]
    for place in places[first:]:
        root.put(f"{place}/nvidia/{VERSION}/gsp_ga10x.bin")
    target = f"/lib/firmware/nvidia/{VERSION}/gsp_ga10x.bin"
    assert targets(root.find()) == {target: f"/{places[first]}/nvidia/{VERSION}/gsp_ga10x.bin"}


def test_graphics_files_are_placed_where_loaders_search(root: Root) -> None:
    root.put("usr/share/glvnd/egl_vendor.d/10_nvidia.json")
    root.put("usr/share/vulkan/icd.d/nvidia_icd.json")
    root.put("etc/OpenCL/vendors/nvidia.icd")
    root.put(f"usr/lib/xorg/modules/extensions/libglxserver_nvidia.so.{VERSION}")
    found = {(file.target, file.capability) for file in root.find()}
    assert found == {
        ("/usr/share/glvnd/egl_vendor.d/10_nvidia.json", "graphics"),
        ("/etc/vulkan/icd.d/nvidia_icd.json", "graphics"),
        ("/etc/OpenCL/vendors/nvidia.icd", "graphics"),
        ("/etc/OpenCL/vendors/nvidia.icd", "compute"),
        (f"/usr/lib/xorg/modules/extensions/libglxserver_nvidia.so.{VERSION}", "graphics"),
    }


@pytest.mark.parametrize(
    ("machine", "folder"),
    [
        ("x86_64", "x86_64-linux-gnu"),
        ("aarch64", "aarch64-linux-gnu"),
        ("ppc64le", "powerpc64le-linux-gnu"),
    ],
)
def test_debians_architecture_folders_are_searched(
    root: Root, monkeypatch: pytest.MonkeyPatch, machine: str, folder: str
) -> None:
    monkeypatch.setattr("os.uname", lambda: SimpleNamespace(machine=machine, release="6.1"))
    module = f"/usr/lib/{folder}/nvidia/xorg/nvidia_drv.so"
    root.add("libcuda.so", "libcuda.so.1", f"usr/lib/{folder}")
    root.put(module[1:])
    library = f"/usr/lib/{folder}/libcuda.so.{VERSION}"
    assert {file.path for file in root.find()} == {library, module}


def test_libraries_with_their_own_version_numbers_are_found(root: Root) -> None:
    root.add("libnvidia-egl-gbm.so", "libnvidia-egl-gbm.so.1", version="1.1.0")
    root.make_cache()
    assert list(targets(root.find())) == ["libnvidia-egl-gbm.so.1.1.0"]


def test_feature_files_are_found_only_with_the_features_device(root: Root) -> None:
    root.put("etc/cufile.json")
    root.put("run/udev/data/c195:0")
    root.put("run/udev/control")
    assert root.find() == ()
    root.put("dev/nvidia-fs0")
    assert [(file.target, file.capability) for file in root.find()] == [
        ("/run/udev/data", "gds"),
        ("/etc/cufile.json", "gds"),
    ]


def test_nvswitch_libraries_are_found_with_their_capability(root: Root) -> None:
    """Two of them belong to rdma-core. NVIDIA's own library is also part of the capability all."""
    root.add("libnvsdm.so", "libnvsdm.so.1")
    root.add("libibumad.so", "libibumad.so.3", version="3.3.50.0")
    root.add("libibmad.so", "libibmad.so.5", version="5.5.50.0")
    root.add_file(f"{own.FOLDER32}/libibmad.so.5", "libibmad.so.5", bits=32)
    root.make_cache()
    assert [(file.target, file.capability) for file in root.find()] == [
        (f"libnvsdm.so.{VERSION}", "nvswitch"),
        ("libibumad.so.3.3.50.0", "nvswitch"),
        ("libibmad.so.5.5.50.0", "nvswitch"),
        (f"libnvsdm.so.{VERSION}", EVERYTHING),
    ]


# Libraries without the driver's version in their names -------------------------------------------


UNVERSIONED = [
    ("libGLX_nvidia.so.0", "graphics"),
    ("libEGL_nvidia.so.0", "graphics"),
    ("libcuda.so.1", "compute"),
    ("libnvidia-ml.so.1", "utility"),
    ("libnvidia-nvvm.so.4", "compute"),
    ("libnvidia-nvvm70.so.4", "compute"),
    ("libnvidia-api.so.1", "graphics"),
    ("libnvcuvid.so.1", "video"),
]


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize(("file", "capability"), UNVERSIONED)
def test_a_library_named_only_by_its_soname_is_found(
    root: Root, file: str, capability: str, cached: bool
) -> None:
    root.add_file(f"{LIBS}/{file}")
    if cached:
        root.make_cache()
    [found] = root.find()
    assert (found.path, found.target) == (f"/{LIBS}/{file}", file)
    assert (found.capability, found.soname) == (capability, file)


def test_a_versioned_link_to_an_unversioned_library_is_followed(root: Root) -> None:
    root.add_file(f"{LIBS}/libGLX_nvidia.so.0")
    root.link(f"{LIBS}/libGLX_nvidia.so.{VERSION}", "libGLX_nvidia.so.0")
    root.make_cache()
    [found] = root.find()
    assert (found.target, found.soname) == ("libGLX_nvidia.so.0", "libGLX_nvidia.so.0")


def test_a_versioned_library_is_preferred_over_its_soname(root: Root) -> None:
    root.add_file("opt/old/libcuda.so.1")
    root.add("libcuda.so", "libcuda.so.1")
    assert targets(root.find("/opt/old")) == {
        f"libcuda.so.{VERSION}": f"/{LIBS}/libcuda.so.{VERSION}"
    }


CONTRADICTIONS = {
    "needs another driver": lambda root: root.put(
        f"{LIBS}/libGLX_nvidia.so.0",
        root.library("libGLX_nvidia.so.0", ("libnvidia-glcore.so.470.256.02", "libc.so.6")),
    ),
    "needs this driver and another": lambda root: root.put(
        f"{LIBS}/libGLX_nvidia.so.0",
        root.library(
            "libGLX_nvidia.so.0", (f"libnvidia-tls.so.{VERSION}", "libnvidia-glcore.so.595.45")
        ),
    ),
    "another version beside it": lambda root: (
        root.add_file(f"{LIBS}/libGLX_nvidia.so.0"),
        root.add_file(f"{LIBS}/libGLX_nvidia.so.595.45.04", "libGLX_nvidia.so.0"),
    ),
    "another library's SONAME": lambda root: root.add_file(
        f"{LIBS}/libGLX_nvidia.so.0", "libGLX_mesa.so.0"
    ),
    "a version of its own": lambda root: root.add_file(f"{LIBS}/libGLX_nvidia.so.0.1"),
    "no version": lambda root: root.add_file(f"{LIBS}/libGLX_nvidia.so"),
    "a stub": lambda root: root.add_file(f"{LIBS}/libcuda.so", "libcuda.so.1"),
    "no library": lambda root: root.put(f"{LIBS}/libGLX_nvidia.so.0", b"\x7fELF and so on"),
    "an empty file": lambda root: root.put(f"{LIBS}/libGLX_nvidia.so.0"),
    "no library of the driver's": lambda root: root.add_file(f"{LIBS}/libnvidia-container.so.1"),
}


@pytest.mark.protects(
    "unversioned-library",
    "an unversioned library of another driver isn't mistaken for this driver's",
    instead="return True",
)
@pytest.mark.parametrize("make", CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_unversioned_libraries_of_contradictory_origin_are_ignored(
    root: Root, make: Callable[[Root], object]
) -> None:
    make(root)
    assert root.find() == ()


def test_an_unversioned_library_that_needs_this_driver_is_found(root: Root) -> None:
    needed = (f"libnvidia-tls.so.{VERSION}", f"libnvidia-glcore.so.{VERSION}", "libX11.so.6")
    root.put(f"{LIBS}/libGLX_nvidia.so.0", root.library("libGLX_nvidia.so.0", needed))
    assert list(targets(root.find())) == ["libGLX_nvidia.so.0"]


# Libraries that no list has ----------------------------------------------------------------------


def test_unlisted_libraries_of_the_drivers_version_are_included(root: Root) -> None:
    for name, soname in {
        "libnvidia-sandboxutils": "libnvidia-sandboxutils.so.1",
        "libnvidia-present": f"libnvidia-present.so.{VERSION}",
        "libnvcuextend": "libnvcuextend.so.1",
        "libnvidia-of-the-year-2031": "libnvidia-of-the-year-2031.so.3",
        "libtileiras": "libtileiras.so.1",
    }.items():
        root.add(f"{name}.so", soname)
        root.add(f"{name}.so", f"{soname}.old", version="470.1.1")
    root.make_cache()
    found = root.find()
    assert {file.capability for file in found} == {EVERYTHING}
    assert sorted(file.target for file in found) == [
        f"libnvcuextend.so.{VERSION}",
        f"libnvidia-of-the-year-2031.so.{VERSION}",
        f"libnvidia-present.so.{VERSION}",
        f"libnvidia-sandboxutils.so.{VERSION}",
        f"libtileiras.so.{VERSION}",
    ]


SHARED = ["libEGL", "libGL", "libGLX", "libGLESv2", "libGLdispatch", "libOpenCL", "libOpenGL"]


@pytest.mark.parametrize("name", SHARED)
def test_libraries_shared_with_other_vendors_are_ignored(root: Root, name: str) -> None:
    root.add(f"{name}.so", f"{name}.so.1")
    root.make_cache()
    assert root.find() == ()


def test_files_that_are_not_native_libraries_are_ignored(root: Root) -> None:
    root.put(f"{LIBS}/libnvidia-new.so.{VERSION}", b"not ELF")
    root.put(f"{LIBS}/libnvidia-list.so.txt.{VERSION}", root.library("libnvidia-list.so.1"))
    root.put(f"{LIBS}/nvidia_drv.so.{VERSION}", root.library("nvidia_drv.so"))
    root.add_file(f"{LIBS}/libnvidia-other.so.{VERSION}", "libnvidia-other.so.1", bits=32)
    (root.path / LIBS / f"libnvidia-folder.so.{VERSION}").mkdir()
    assert root.find() == ()


def test_unlisted_32_bit_libraries_are_included(root: Root) -> None:
    root.add_file(f"{own.FOLDER32}/libnvidia-new.so.{VERSION}", "libnvidia-new.so.1", bits=32)
    [found] = root.find()
    assert (found.kind, found.capability) == ("library32", EVERYTHING)


@pytest.mark.parametrize("folder", ["usr/lib32", "usr/lib", "run/opengl-driver-32/lib"])
def test_32_bit_libraries_are_found_without_a_cache(root: Root, folder: str) -> None:
    root.add_file(f"{folder}/libcuda.so.{VERSION}", "libcuda.so.1", bits=32)
    root.add("libcuda.so", "libcuda.so.1")
    assert [file.kind for file in root.find()] == ["library", "library32"]


def test_x_modules_without_a_version_are_found(root: Root) -> None:
    extensions = "usr/lib64/xorg/modules/extensions"
    root.put(f"{extensions}/libglxserver_nvidia.so")
    root.put("usr/lib64/xorg/modules/drivers/nvidia_drv.so")
    assert {file.target for file in root.find()} == {
        f"/{extensions}/libglxserver_nvidia.so",
        "/usr/lib64/xorg/modules/drivers/nvidia_drv.so",
    }

"""Libraries with the names in real packages, for several versions and distributions.

The names come from these packages: Debian 12's (535), NVIDIA's installer as run on Ubuntu
(575), and negativo17's for Fedora (610, x86_64 and aarch64).
"""

import pytest
from driver_tree import LIBS, Root

from gpuhook.vendors.nvidia.model import EVERYTHING

# Name without the version -> number of the SONAME, or "" if it is the driver's version.
_COMMON: dict[str, str | None] = {
    "libcuda": "1", "libcudadebugger": "1", "libnvcuvid": "1", "libnvidia-allocator": "1",
    "libnvidia-cfg": "1", "libnvidia-encode": "1", "libnvidia-fbc": "1", "libnvidia-ml": "1",
    "libnvidia-ngx": "1", "libnvidia-nvvm": "4", "libnvidia-opencl": "1",
    "libnvidia-opticalflow": "1", "libnvidia-ptxjitcompiler": "1", "libvdpau_nvidia": "1",
    "libEGL_nvidia": "0", "libGLESv1_CM_nvidia": "1", "libGLESv2_nvidia": "2",
    "libnvidia-eglcore": "", "libnvidia-glcore": "", "libnvidia-glsi": "",
    "libnvidia-glvkspirv": "", "libnvidia-pkcs11-openssl3": "", "libnvidia-rtcore": "",
    "libnvidia-tls": "",
}  # fmt: skip
_NEWER: dict[str, str | None] = {"libnvidia-gpucomp": "", "libnvoptix": "1"}
_SANDBOX, _VKSC = {"libnvidia-sandboxutils": "1"}, {"libnvidia-vksc-core": "1"}
_PRESENT = {"libnvidia-present": ""}

Package = tuple[dict[str, str | None], list[str], set[str]]

# Driver version -> libraries with this version in their names, files without it, and those of the
# libraries that no list contains.
PACKAGES: dict[str, Package] = {
    "535.309.01": (
        {**_COMMON, "libGLX_nvidia": "0", "libnvidia-vulkan-producer": None},
        ["libnvidia-api.so.1"],
        set(),
    ),
    "575.57.08": (
        {
            **_COMMON, **_NEWER, **_SANDBOX, **_VKSC, **_PRESENT, "libGLX_nvidia": "0",
            "libnvidia-gtk2": "", "libnvidia-gtk3": "", "libnvidia-pkcs11": "",
            "libnvidia-wayland-client": "",
        },
        ["libnvidia-nvvm70.so.4", "libnvidia-api.so.1"],
        {
            "libnvidia-gtk2", "libnvidia-gtk3", "libnvidia-wayland-client",
            *_SANDBOX, *_VKSC, *_PRESENT,
        },
    ),
    "610.43.02": (
        {**_COMMON, **_NEWER, **_SANDBOX, **_VKSC, **_PRESENT, "libnvidia-tileiras": ""},
        ["libGLX_nvidia.so.0", "libnvidia-nvvm70.so.4", "libnvidia-api.so.1"],
        {*_SANDBOX, *_VKSC, *_PRESENT},
    ),
    "610.43.03": (  # of aarch64
        {
            **_COMMON, **_NEWER, **_SANDBOX, **_PRESENT, "libnvidia-tileiras": "",
            "libnvcuextend": "1",
        },
        ["libGLX_nvidia.so.0", "libnvidia-nvvm70.so.4", "libnvidia-api.so.1"],
        {*_SANDBOX, *_PRESENT, "libnvcuextend"},
    ),
}  # fmt: skip
CASES = pytest.mark.parametrize("version", PACKAGES)


def build(root: Root, version: str) -> None:
    """Install a package's libraries as a distribution does, with leftovers of another driver."""
    root.version = version
    versioned, files, _ = PACKAGES[version]
    for name, number in versioned.items():
        file = f"{name}.so.{version}"
        soname = None if number is None else f"{name}.so.{number}" if number else file
        root.put(f"{LIBS}/{file}", root.library(soname))
    for file in files:
        root.add_file(f"{LIBS}/{file}")
    for file in ("libnvidia-container.so.1.19.0", "libnvidia-cfg.so.470.256.02", "libGL.so.1.7.0"):
        root.add_file(f"{LIBS}/{file}")
    root.make_cache()


@CASES
def test_every_library_is_found_and_nothing_else(root: Root, version: str) -> None:
    build(root, version)
    versioned, files, unlisted = PACKAGES[version]
    found = root.find()
    assert {file.target for file in found} == {
        *(f"{name}.so.{version}" for name in versioned),
        *files,
    }
    alone = {file.target.partition(".so")[0] for file in found if file.capability == EVERYTHING}
    assert alone == unlisted


@CASES
def test_the_compute_capability_includes_the_kernel_compilers(root: Root, version: str) -> None:
    build(root, version)
    compute = {file.target for file in root.find() if file.capability == "compute"}
    assert f"libnvidia-ptxjitcompiler.so.{version}" in compute
    assert ("libnvidia-nvvm70.so.4" in compute) == (version != "535.309.01")


def test_a_library_with_a_duplicate_soname_keeps_its_name(root: Root) -> None:
    """The loader's cache contains only one of two files with the same SONAME."""
    root.add("libnvidia-nvvm.so", "libnvidia-nvvm.so.4")
    root.add_file(f"{LIBS}/libnvidia-nvvm70.so.4", "libnvidia-nvvm.so.4")
    root.make_cache()
    found = {file.target: file.soname for file in root.find()}
    assert found == {
        f"libnvidia-nvvm.so.{root.version}": "libnvidia-nvvm.so.4",
        "libnvidia-nvvm70.so.4": "libnvidia-nvvm70.so.4",
    }

"""Find what graphics needs beside the driver's libraries: vendor files, X modules, GBM backend.

These files register the driver with loaders that know no vendor (GLVND, EGL, Vulkan, OpenCL,
X.Org, GBM); without them the libraries are there and nobody finds them.
"""

import stat

from gpuhook.ground.loader import layout
from gpuhook.ground.names import machine_name
from gpuhook.start.inventory.model import DriverFile

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpuhook.ground.container.rootfs import Rootfs

# Where configuration files are looked for below the driver root, best first.
_CONFIG_FOLDERS = ("/etc", "/usr/local/share", "/usr/share")

# folder in the container -> names below it (and below one of the folders above on the host).
_CONFIG_FILES = {
    "/usr/share": (
        "glvnd/egl_vendor.d/10_nvidia.json",
        "egl/egl_external_platform.d/15_nvidia_gbm.json",
        "egl/egl_external_platform.d/10_nvidia_wayland.json",
        "egl/egl_external_platform.d/09_nvidia_wayland2.json",
        "egl/egl_external_platform.d/20_nvidia_xcb.json",
        "egl/egl_external_platform.d/20_nvidia_xlib.json",
        "nvidia/nvoptix.bin",
        "X11/xorg.conf.d/10-nvidia.conf",
        "X11/xorg.conf.d/nvidia-drm-outputclass.conf",
    ),
    "/etc": (
        "OpenCL/vendors/nvidia.icd",
        "vulkan/icd.d/nvidia_icd.json",
        "vulkan/icd.d/nvidia_icd.{machine}.json",
        "vulkan/icd.d/nvidia_layers.json",
        "vulkan/implicit_layer.d/nvidia_layers.json",
    ),
}
_OPENCL = "OpenCL/vendors/nvidia.icd"  # the one that compute needs as well

_XORG_FOLDERS = (
    "/usr/lib/{triplet}/nvidia/xorg",
    "/usr/lib/{triplet}/xorg/modules/drivers",
    "/usr/lib/{triplet}/xorg/modules/extensions",
    "/usr/lib/nvidia/current",
    "/usr/lib/xorg/modules/drivers",
    "/usr/lib/xorg/modules/extensions",
    "/usr/lib64/xorg/modules/drivers",
    "/usr/lib64/xorg/modules/extensions",
)


def find(root: "Rootfs", version: str) -> "Iterator[DriverFile]":
    """Yield the files that exist below the driver root, capability graphics (or compute)."""
    yield from _configs(root)
    yield from _xorg_modules(root, version)


def _configs(root: "Rootfs") -> "Iterator[DriverFile]":
    machine = machine_name()
    for folder, names in _CONFIG_FILES.items():
        for pattern in names:
            name = pattern.replace("{machine}", machine)
            for place in _CONFIG_FOLDERS:
                path = _regular(root, f"{place}/{name}")
                if path is not None:
                    yield DriverFile("config", path, f"{folder}/{name}", "graphics")
                    if name == _OPENCL:
                        yield DriverFile("config", path, f"{folder}/{name}", "compute")
                    break


def _xorg_modules(root: "Rootfs", version: str) -> "Iterator[DriverFile]":
    triplet = layout.triplet(machine_name())
    for name in ("nvidia_drv.so", f"libglxserver_nvidia.so.{version}"):
        for pattern in _XORG_FOLDERS:
            found = f"{pattern.replace('{triplet}', triplet)}/{name}"
            path = _regular(root, found)
            if path is not None:
                yield DriverFile("config", path, found, "graphics")
                break


def _regular(root: "Rootfs", path: str) -> str | None:
    """Return a regular file's path with links resolved, None if there is none."""
    status = root.stat(path)
    if status is None or not stat.S_ISREG(status.st_mode):
        return None
    return root.real_path(path)

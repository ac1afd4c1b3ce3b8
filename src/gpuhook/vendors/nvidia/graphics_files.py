"""Search for graphics files other than libraries and manifests: X modules, configuration.

These files are used by the X server and by OptiX.
"""

import stat

from gpuhook.base.loader import layout
from gpuhook.base.names import machine_name
from gpuhook.core.inventory.model import DriverFile

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpuhook.base.container.rootfs import Rootfs
    from gpuhook.vendors.nvidia.locations import Locations

# Names below /usr/share in the container, and below a folder of shared data on the host.
_CONFIG_FILES = (
    "nvidia/nvoptix.bin",
    "X11/xorg.conf.d/10-nvidia.conf",
    "X11/xorg.conf.d/nvidia-drm-outputclass.conf",
)

_GLX = "libglxserver_nvidia.so"
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


def find(root: "Rootfs", version: str, locations: "Locations") -> "Iterator[DriverFile]":
    """Yield the files that exist below the driver root, capability graphics."""
    for name in _CONFIG_FILES:
        for folder in locations.data:
            path = locations.own_file(f"{folder}/{name}")
            if path is not None and _regular(root, path) is not None:
                yield DriverFile("config", path, f"/usr/share/{name}", "graphics")
                break
    yield from _xorg_modules(root, version)


def _xorg_modules(root: "Rootfs", version: str) -> "Iterator[DriverFile]":
    triplet = layout.triplet(machine_name())
    folders = [pattern.replace("{triplet}", triplet) for pattern in _XORG_FOLDERS]
    # Some distributions omit the version of the second.
    for names in (("nvidia_drv.so",), (f"{_GLX}.{version}", _GLX)):
        for found in (f"{folder}/{name}" for name in names for folder in folders):
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

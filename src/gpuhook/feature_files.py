"""The opt-in features (NVIDIA_GDS, NVIDIA_MOFED, ...): their device nodes and files.

Hot path: imports nothing.
"""

from gpuhook.inventory import DriverFile

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpuhook.rootfs import Rootfs

# feature -> folder of its nodes, and what their names begin with.
_NODES = {
    "gds": (("/dev", "nvidia-fs"),),
    "mofed": (("/dev/infiniband", "uverbs"), ("/dev/infiniband", "rdma_cm")),
    "gdrcopy": (("/dev", "gdrdrv"),),
    "nvswitch": (("/dev", "nvidia-nvswitch"),),
}

# What GPUDirect Storage reads: the devices' properties and its own configuration.
GDS_FILES = ("/run/udev", "/etc/cufile.json")


def feature_of(path: str) -> str | None:
    """Return the feature that a device node belongs to, None for the driver's other nodes."""
    folder, _, name = path.rpartition("/")
    for feature, places in _NODES.items():
        if any(folder == where and name.startswith(prefix) for where, prefix in places):
            return feature
    return None


def node_paths(root: "Rootfs") -> "Iterator[str]":
    """Yield the paths of all features' nodes below the driver root."""
    for folder in ("/dev", "/dev/infiniband"):
        for name in root.list_folder(folder):
            if feature_of(f"{folder}/{name}"):
                yield f"{folder}/{name}"


def find(root: "Rootfs") -> "Iterator[DriverFile]":
    """Yield the files that features mount; the capability is the feature's name."""
    for path in GDS_FILES:
        if root.exists(path):
            yield DriverFile("config", root.real_path(path), path, "gds")

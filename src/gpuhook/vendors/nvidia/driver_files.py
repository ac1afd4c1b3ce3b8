"""Find the driver's files below a driver root: libraries, programs, firmware, configuration.

Libraries are found as the loader would find them, through the root's ld.so.cache, and only
in the version of the loaded driver; folders outside the cache are searched after that.
"""

import os
import stat

from gpuhook.ground.container.rootfs import Rootfs
from gpuhook.ground.errors import ElfError, NoDriverError
from gpuhook.ground.loader import elf, ldcache
from gpuhook.ground.loader.layout import cache_flags, triplet
from gpuhook.ground.names import machine_name
from gpuhook.start.inventory.model import SOCKET, DriverFile
from gpuhook.vendors.nvidia import device_nodes, graphics_files

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

LIBRARIES = {
    "utility": ("libnvidia-ml.so", "libnvidia-cfg.so", "libnvidia-nscq.so"),
    "compute": (
        "libcuda.so",
        "libcudadebugger.so",
        "libnvidia-opencl.so",
        "libnvidia-gpucomp.so",
        "libnvidia-ptxjitcompiler.so",
        "libnvidia-fatbinaryloader.so",
        "libnvidia-allocator.so",
        "libnvidia-compiler.so",
        "libnvidia-pkcs11.so",
        "libnvidia-pkcs11-openssl3.so",
        "libnvidia-nvvm.so",
        "libnvidia-nvvm70.so",
        "libnvidia-tileiras.so",
    ),
    "ngx": ("libnvidia-ngx.so",),
    "video": (
        "libvdpau_nvidia.so",
        "libnvidia-encode.so",
        "libnvidia-opticalflow.so",
        "libnvcuvid.so",
    ),
    "graphics": (
        "libnvidia-eglcore.so",
        "libnvidia-glcore.so",
        "libnvidia-tls.so",
        "libnvidia-glsi.so",
        "libnvidia-fbc.so",
        "libnvidia-ifr.so",
        "libnvidia-rtcore.so",
        "libnvoptix.so",
        "libGLX_nvidia.so",
        "libEGL_nvidia.so",
        "libGLESv2_nvidia.so",
        "libGLESv1_CM_nvidia.so",
        "libnvidia-glvkspirv.so",
        "libnvidia-cbl.so",
        "libnvidia-gpucomp.so",
        "libnvidia-allocator.so",
        "libnvidia-vulkan-producer.so",
        "libnvidia-egl-gbm.so",
        "libnvidia-egl-wayland.so",
        "libnvidia-egl-wayland2.so",
        "libnvidia-egl-xcb.so",
        "libnvidia-egl-xlib.so",
    ),
}

# Libraries that have versions of their own, not the driver's.
_OWN_VERSION = frozenset(
    {
        "libnvidia-egl-gbm.so",
        "libnvidia-egl-wayland.so",
        "libnvidia-egl-wayland2.so",
        "libnvidia-egl-xcb.so",
        "libnvidia-egl-xlib.so",
    }
)

BINARIES = {
    "utility": ("nvidia-smi", "nvidia-debugdump", "nvidia-persistenced", "nv-fabricmanager"),
    "compute": ("nvidia-cuda-mps-control", "nvidia-cuda-mps-server"),
}

# Of the driver's daemons. MPS' folder isn't among them: everybody may make /tmp/nvidia-mps, and
# whoever has the folder of root's daemon can end the work of all others.
SOCKETS = ("/run/nvidia-persistenced/socket", "/run/nvidia-fabricmanager/socket")

# What GPUDirect Storage reads: the devices' properties and its own configuration. Beside them,
# /run/udev has the socket by which udev is stopped.
_GDS_FILES = ("/run/udev/data", "/etc/cufile.json")  # protects: udev-socket

# The last is of systems that keep the driver in one folder, as GKE's nodes do.
_BINARY_FOLDERS = (
    "/usr/bin",
    "/usr/sbin",
    "/bin",
    "/sbin",
    "/usr/local/bin",
    "/usr/local/sbin",
    "/usr/local/nvidia/bin",
)
_FIRMWARE = "/lib/firmware"
_FIRMWARE_PARAMETER = "/sys/module/firmware_class/parameters/path"
_PARAMETER_LIMIT = 1 << 13  # bytes; the kernel keeps a path
_CACHE_LIMIT = 64 << 20


def library_folders(machine: str) -> tuple[str, ...]:
    """Return where drivers put their libraries when no ld.so.cache lists them."""
    folder = f"/usr/lib/{triplet(machine)}"
    return (
        folder,
        f"{folder}/nvidia/current",
        "/usr/lib64",
        "/usr/lib",
        f"{folder}/vdpau",
        "/usr/lib64/vdpau",
        # Of a driver root that is one folder, and of systems that have such a folder.
        f"/lib/{triplet(machine)}",
        "/lib64",
        "/lib",
        "/usr/local/nvidia/lib64",
    )


class LibraryIndex:
    """Which file a library's name leads to, below one driver root."""

    def __init__(self, root: Rootfs, cache_path: str, folders: tuple[str, ...]) -> None:
        self._root = root
        self._machine = machine_name()
        self._folders = folders or library_folders(self._machine)
        self._entries = self._read_cache(cache_path or "/etc/ld.so.cache")

    def _read_cache(self, path: str) -> "list[tuple[str, str, int]]":
        data = self._root.read_file(path, _CACHE_LIMIT)
        if data is None:
            return []
        where = self._root.path.rstrip("/") + path
        return [
            (os.fsdecode(entry.key), os.fsdecode(entry.value), entry.flags)
            for entry in ldcache.parse(data, where).entries
            if entry.hwcap == 0
        ]

    def candidates(self, name: str, *, bits32: bool = False) -> "Iterator[str]":
        """Yield paths that may be the library, the loader's own choice first."""
        flags = cache_flags(self._machine, bits32=bits32)
        for key, path, entry_flags in self._entries:
            if flags is not None and _same_abi(entry_flags, flags) and _is_library(key, name):
                yield path
        if not bits32:
            yield from self._in_folders(name)

    def _in_folders(self, name: str) -> "Iterator[str]":
        for folder in self._folders:
            for found in reversed(self._root.list_folder(folder)):
                if _is_library(found, name):
                    yield f"{folder}/{found}"


def _same_abi(flags: int, wanted: int) -> bool:
    """Compare ELF bit and architecture: a 32-bit library that needs no libc lacks the libc6 bit."""
    return bool(flags & 1) and flags & 0xFF00 == wanted & 0xFF00


def _is_library(found: str, name: str) -> bool:
    """Tell whether a file name is ``name`` (which ends in .so) or ``name`` and a version."""
    return found == name or found.startswith(name + ".")


def find_nvml(root: Rootfs, index: LibraryIndex, config_file: str) -> str:
    """Return the resolved path of libnvidia-ml below the root; DriverError if there is none.

    ``config_file`` is the configuration that names the root, for the error.
    """
    for path in index.candidates("libnvidia-ml.so"):
        if root.exists(path):
            return root.real_path(path)
    where = "on this host" if root.path == "/" else f"below the driver root {root.path}"
    raise NoDriverError(
        f"There is no NVIDIA driver {where}: libnvidia-ml.so.1 is not there",
        "Install the driver and run ldconfig, or name where it is, by [nvidia-container-cli] root "
        f"or the folders of its libraries by [gpuhook] library-search-paths, in {config_file}",
    )


def find_all(root: Rootfs, index: LibraryIndex, version: str) -> tuple[DriverFile, ...]:
    """Find every file of the driver with this version."""
    found = list(_libraries(root, index, version, bits32=False))
    found += _libraries(root, index, version, bits32=True)
    found += _binaries(root)
    found += _firmware(root, version)
    found += graphics_files.find(root, version)
    found += _feature_files(root)
    return tuple(found)


def _libraries(
    root: Rootfs, index: LibraryIndex, version: str, *, bits32: bool
) -> "Iterator[DriverFile]":
    kind = "library32" if bits32 else "library"
    for capability, names in LIBRARIES.items():
        for name in names:
            library = _library(root, index, name, version, bits32=bits32)
            if library is not None:
                path, soname = library
                yield DriverFile(kind, path, path.rpartition("/")[2], capability, soname)


def _library(
    root: Rootfs, index: LibraryIndex, name: str, version: str, *, bits32: bool
) -> tuple[str, str | None] | None:
    """Return the resolved path and the SONAME of the first candidate that fits the driver."""
    for candidate in index.candidates(name, bits32=bits32):
        if not root.exists(candidate):
            continue
        path = root.real_path(candidate)
        if name not in _OWN_VERSION and not path.endswith("." + version):
            continue
        fd = root.open_file(path)
        if fd is None:
            continue
        try:
            library = elf.read(fd, root.path.rstrip("/") + path)
        except ElfError:
            continue  # a damaged file that the loader couldn't load either
        finally:
            os.close(fd)
        if library.bits == (32 if bits32 else 64):
            return path, library.soname
    return None


def volatile_paths() -> list[str]:
    """Return the paths that come and go without a change of driver, /etc/ld.so.cache or nodes.

    Programs of packages without libraries, configuration.
    """
    paths = [*_GDS_FILES]
    for names in BINARIES.values():
        paths += [f"{folder}/{name}" for folder in _BINARY_FOLDERS for name in names]
    return paths


def find_program(root: Rootfs, name: str) -> str | None:
    """Return the resolved path of a program of the driver's below the root, None for none.

    A script counts only where there is nothing else: such a wrapper runs what a container and
    another root don't have.
    """
    script = None
    for folder in _BINARY_FOLDERS:
        status = root.stat(f"{folder}/{name}")
        if status is None or not stat.S_ISREG(status.st_mode):
            continue
        path = root.real_path(f"{folder}/{name}")
        if _is_elf(root, path):
            return path
        script = script or path
    return script


def _is_elf(root: Rootfs, path: str) -> bool:
    fd = root.open_file(path)
    if fd is None:
        return False
    try:
        return os.pread(fd, len(elf.MAGIC), 0) == elf.MAGIC
    finally:
        os.close(fd)


def _binaries(root: Rootfs) -> "Iterator[DriverFile]":
    for capability, names in BINARIES.items():
        for name in names:
            path = find_program(root, name)
            if path is not None:
                yield DriverFile("binary", path, f"/usr/bin/{name}", capability)


def _firmware(root: Rootfs, version: str) -> "Iterator[DriverFile]":
    """Yield GSP's firmware, each file where the kernel finds it first.

    Source: Documentation/driver-api/firmware/fw_search_path.rst.
    """
    found = set()
    for place in _firmware_folders(root):
        folder = f"{place}/nvidia/{version}"
        for name in root.list_folder(folder):
            if name.startswith("gsp") and name.endswith(".bin") and name not in found:
                found.add(name)
                path = root.real_path(f"{folder}/{name}")
                yield DriverFile("firmware", path, f"{_FIRMWARE}/nvidia/{version}/{name}", "")


def _firmware_folders(root: Rootfs) -> list[str]:
    release = os.uname().release
    folders = [f"{_FIRMWARE}/updates/{release}", f"{_FIRMWARE}/updates"]
    folders += [f"{_FIRMWARE}/{release}", _FIRMWARE]
    own = os.fsdecode((root.read_file(_FIRMWARE_PARAMETER, _PARAMETER_LIMIT) or b"").strip())
    return [own.rstrip("/"), *folders] if own.startswith("/") else folders


def sockets() -> tuple[DriverFile, ...]:
    """Return the sockets of the driver's daemons, be they there or not."""
    return tuple(DriverFile(SOCKET, path, path, "utility") for path in SOCKETS)


def _feature_files(root: Rootfs) -> "Iterator[DriverFile]":
    """Yield the files that features mount where they have nodes; the capability is the feature."""
    features = {device_nodes.feature_of(path) for path in device_nodes.feature_node_paths(root)}
    for path in _GDS_FILES if "gds" in features else ():
        if root.exists(path):
            yield DriverFile("config", root.real_path(path), path, "gds")

"""Search for the driver's files below a driver root: libraries, programs, firmware, configuration.

Libraries are found as the loader would find them, through the root's ld.so.cache, and only in
the loaded driver's version. Folders outside the cache are searched after that.
"""

import os
import stat

from gpuhook.base.container.rootfs import Rootfs
from gpuhook.base.errors import ElfError, NoDriverError, UntrustedPathError
from gpuhook.base.loader import elf, ldcache
from gpuhook.base.loader.layout import cache_flags, is_library_name
from gpuhook.base.names import machine_name
from gpuhook.core.inventory.model import SOCKET, DriverFile
from gpuhook.vendors import path_policy
from gpuhook.vendors.nvidia import device_nodes, graphics_files, manifests
from gpuhook.vendors.nvidia.locations import (
    Locations,
    library_folders,
    program_paths,
    program_trees,
)
from gpuhook.vendors.nvidia.model import EVERYTHING, LINKED

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from gpuhook.base.config.model import Config

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
        "libnvidia-api.so",
    ),
}

# Libraries that only containers with a feature get, as NVIDIA's management specs have them (toolkit
# 1.20.2): NVLink's and NVSwitch's management, and what that needs of rdma-core.
_FEATURE_LIBRARIES = {"nvswitch": ("libnvsdm.so", "libibumad.so", "libibmad.so")}

# Libraries with names that other vendors use, too: the driver's would replace those.
_SHARED = frozenset(
    {
        "libEGL.so",
        "libGL.so",
        "libGLESv1_CM.so",
        "libGLESv2.so",
        "libGLX.so",
        "libGLdispatch.so",
        "libOpenCL.so",
        "libOpenGL.so",
        "libglxserver_nvidia.so",  # an X module, which has a folder of its own
    }
)

# Libraries in NVIDIA's packages with a fixed number instead of the driver's version.
_UNVERSIONED = frozenset({"libnvidia-api.so", "libnvidia-nvvm70.so"})

# Libraries with their own versions instead of the driver's.
_OWN_VERSION = frozenset(
    {
        "libnvidia-egl-gbm.so",
        "libnvidia-egl-wayland.so",
        "libnvidia-egl-wayland2.so",
        "libnvidia-egl-xcb.so",
        "libnvidia-egl-xlib.so",
        "libibumad.so",
        "libibmad.so",
    }
)

BINARIES = {
    "utility": ("nvidia-smi", "nvidia-debugdump", "nvidia-persistenced", "nv-fabricmanager"),
    "compute": ("nvidia-cuda-mps-control", "nvidia-cuda-mps-server"),
}

# Sockets of the driver's daemons. MPS' folder isn't included: any user may create
# /tmp/nvidia-mps, and access to root's daemon allows ending the work of all others.
SOCKETS = ("/run/nvidia-persistenced/socket", "/run/nvidia-fabricmanager/socket")

# Files that GPUDirect Storage reads: device properties and its own configuration. Only a part of
# /run/udev, which also has the socket that controls udev.
_GDS_FILES = ("/run/udev/data", "/etc/cufile.json")  # protects: udev-socket

# Where images have the loader that programs name; "" for programs without one.
_LOADER_FOLDERS = ("", "/lib", "/lib64", "/usr/lib", "/usr/lib64")

_FIRMWARE = "/lib/firmware"
_FIRMWARE_PARAMETER = "/sys/module/firmware_class/parameters/path"
_MAX_PARAMETER = 1 << 13  # bytes; the kernel stores a path
_MAX_CACHE = 64 << 20


class LibraryIndex:
    """Index from library names to files, below one driver root.

    ``folders`` are searched before the usual ones.
    """

    def __init__(self, root: Rootfs, cache_path: str, folders: tuple[str, ...] = ()) -> None:
        self._root = root
        self._machine = machine_name()
        self._configured = folders
        self._entries = self._read_cache(cache_path or "/etc/ld.so.cache")
        self._listed: dict[bool, dict[str, list[str]]] = {}

    def _read_cache(self, path: str) -> "list[tuple[str, str, int]]":
        data = self._root.read_file(path, _MAX_CACHE)
        if data is None:
            return []
        where = self._root.path.rstrip("/") + path
        return [
            (os.fsdecode(entry.key), os.fsdecode(entry.value), entry.flags)
            for entry in ldcache.parse(data, where).entries
            if entry.hwcap == 0
        ]

    def candidates(self, name: str, *, bits32: bool = False) -> "Iterator[str]":
        """Yield paths of possible files of a library, the loader's own choice first."""
        for key, path in self._cached(bits32=bits32):
            if stem_of(key) == name:
                yield path
        yield from self.listed(bits32=bits32).get(name, ())

    def _cached(self, *, bits32: bool) -> "Iterator[tuple[str, str]]":
        flags = cache_flags(self._machine, bits32=bits32)
        for key, path, entry_flags in self._entries:
            if flags is not None and _same_abi(entry_flags, flags):
                yield key, path

    def listed(self, *, bits32: bool = False) -> dict[str, list[str]]:
        """Return the libraries in the driver's folders, by ``stem_of``.

        They may be of any ABI.
        """
        if bits32 not in self._listed:
            found: dict[str, list[str]] = {}
            for folder in self._folders(bits32=bits32):
                for name in reversed(self._root.list_folder(folder)):
                    stem = stem_of(name)
                    if stem:
                        found.setdefault(stem, []).append(f"{folder}/{name}")
            self._listed[bits32] = found
        return self._listed[bits32]

    def _folders(self, *, bits32: bool) -> "Iterator[str]":
        """Yield the folders to search, without duplicates: configured, usual, from the cache."""
        known = {name for names in LIBRARIES.values() for name in names}
        cached = [path for key, path in self._cached(bits32=bits32) if stem_of(key) in known]
        # The targets of links, which may be folders that the loader itself doesn't search.
        real = [self._root.real_path(path) for path in cached if self._root.exists(path)]
        seen = set()
        for folder in (
            *self._configured,
            *library_folders(self._machine, bits32=bits32),
            *(path.rpartition("/")[0] for path in (*cached, *real)),
        ):
            if folder in seen or not self._root.exists(folder):
                continue
            place = self._root.real_path(folder)
            if place not in seen:
                yield folder
            seen |= {folder, place}


def _same_abi(flags: int, wanted: int) -> bool:
    """Compare ELF bit and architecture: a 32-bit library without libc lacks the libc6 bit."""
    return bool(flags & 1) and flags & 0xFF00 == wanted & 0xFF00


def stem_of(name: str) -> str:
    """Return a library's name without its version (libcuda.so), "" if it isn't a library."""
    head, suffix, version = name.partition(".so")
    is_library = head.startswith("lib") and suffix and (not version or version[0] == ".")
    return head + suffix if is_library else ""


def find_nvml(root: Rootfs, index: LibraryIndex, config_file: str) -> str:
    """Return the resolved path of libnvidia-ml below the root; DriverError if there is none.

    ``config_file`` is the configuration that names the root, for the error.
    """
    for path in index.candidates("libnvidia-ml.so"):
        if root.exists(path):
            return root.real_path(path)
    is_host = root.path == "/"
    where = "on this host" if is_host else f"below the driver root {root.path}"
    trial = "; to try gpuhook without a GPU, see gpuhook help simulate" if is_host else ""
    raise NoDriverError(
        f"There is no NVIDIA driver {where}: libnvidia-ml.so.1 is not there",
        "Install the driver and run ldconfig, or name where it is, by [nvidia-container-cli] root "
        "or the folders of its libraries by [gpuhook] library-search-paths, in "
        f"{config_file}{trial}",
    )


def find_all(
    root: Rootfs, index: LibraryIndex, version: str, locations: Locations | None = None
) -> tuple[DriverFile, ...]:
    """Find all files of the driver with this version."""
    locations = locations or Locations(root)
    libraries = [
        *_libraries(root, index, version, bits32=False),
        *_libraries(root, index, version, bits32=True),
    ]
    found, named = manifests.find(root, locations, libraries)
    return (
        *(_for_manifests(each, named) for each in libraries),
        *_binaries(root, locations, version, libraries),
        *_firmware(root, version),
        *found,
        *graphics_files.find(root, version, locations),
        *_feature_files(root),
    )


def _libraries(
    root: Rootfs, index: LibraryIndex, version: str, *, bits32: bool
) -> "Iterator[DriverFile]":
    """Yield the libraries by capability, then the driver's libraries that aren't listed here."""
    kind = "library32" if bits32 else "library"
    bits = 32 if bits32 else 64
    listed = set()
    features = {} if bits32 else _FEATURE_LIBRARIES
    for capability, names in (*LIBRARIES.items(), *features.items()):
        for name in names:
            if capability in LIBRARIES:  # others come with all capabilities as well
                listed.add(name)
            library = _library(root, index.candidates(name, bits32=bits32), name, version, bits)
            if library is not None:
                path, soname = library
                yield DriverFile(kind, path, path.rpartition("/")[2], capability, soname)
    for stem, paths in sorted(index.listed(bits32=bits32).items()):
        if stem in listed or stem in _SHARED:
            continue
        versioned = [path for path in paths if path.endswith(f"/{stem}.{version}")]
        library = _library(root, versioned, stem, version, bits)
        if library is not None:
            path, soname = library
            yield DriverFile(kind, path, path.rpartition("/")[2], EVERYTHING, soname)


def _library(
    root: Rootfs, candidates: "Iterable[str]", name: str, version: str, bits: int
) -> tuple[str, str | None] | None:
    """Return the resolved path and the SONAME of the first candidate that fits the driver.

    A name without a version counts if there is no other, and nothing contradicts it.
    """
    unversioned = None
    ending = "." + version
    for candidate in candidates:
        if not root.exists(candidate):
            continue
        path = root.real_path(candidate)
        library = _read(root, path)
        if library is None or library.bits != bits:
            continue
        if name in _OWN_VERSION or path.endswith(ending) or candidate.endswith(ending):
            return path, library.soname
        if unversioned is None and _may_be(root, path, name, library, version):
            unversioned = path, path.rpartition("/")[2]
    return unversioned


def _read(root: Rootfs, path: str) -> "elf.ElfLibrary | None":
    """Return a library's ELF properties; None for a file that the loader couldn't load."""
    fd = root.open_file(path)
    if fd is None:
        return None
    try:
        return elf.read(fd, root.path.rstrip("/") + path)
    except ElfError:
        return None
    finally:
        os.close(fd)


def _may_be(root: Rootfs, path: str, name: str, library: "elf.ElfLibrary", version: str) -> bool:
    """Tell whether a library without the driver's version in its name may be this driver's.

    Its file name is its SONAME (libGLX_nvidia.so.0). It isn't this driver's if it needs parts of
    another driver, or if the same folder has the library in another version.
    """
    folder, _, file = path.rpartition("/")
    if not file.removeprefix(f"{name}.").isdecimal():
        return False
    if library.soname != file and name not in _UNVERSIONED:
        return False
    needed = _driver_versions(each for each in library.needed if "nvidia" in each)
    others = _driver_versions(each for each in root.list_folder(folder) if stem_of(each) == name)
    # protects: unversioned-library
    return needed <= {version} and (not others or version in others)


def _driver_versions(names: "Iterable[str]") -> set[str]:
    """Return versions in library names that have a driver version's form: 580.65.06, 595.45."""
    found = set()
    for name in names:
        version = name.rpartition(".so.")[2]
        numbers = version.split(".")
        is_number = all(number.isascii() and number.isdecimal() for number in numbers)
        if is_number and len(numbers) in (2, 3) and len(numbers[0]) >= 3:
            found.add(version)
    return found


def _for_manifests(file: DriverFile, named: "set[str]") -> DriverFile:
    """Return a library with the capability of manifests that name it, if it isn't listed."""
    is_needed = file.capability == EVERYTHING and file.path in named
    return file.but(capability=manifests.CAPABILITY) if is_needed else file


def volatile_paths(config: "Config") -> list[str]:
    """Return paths that can change while driver, /etc/ld.so.cache and nodes stay the same.

    Programs of packages without libraries, configuration, folders of manifests.
    """
    paths = [*_GDS_FILES, *program_trees(), *manifests.folders(config)]
    for names in BINARIES.values():
        paths += [path for name in names for path in program_paths(config, name)]
    return paths


def watched_paths(config: "Config") -> list[str]:
    """Return the folders in which a new name may be a part of the driver."""
    return [*program_trees(), *manifests.folders(config)]


def find_program(root: Rootfs, name: str, locations: Locations, version: str = "") -> str | None:
    """Return the resolved path of a driver's program below the root, None if there is none.

    A script counts only as a last resort: such a wrapper runs files that containers don't have.
    Of folders for several drivers, those of ``version`` come first.
    """
    script = None
    for folder in (*locations.programs, *locations.trees_for(version)):
        path = locations.own_file(f"{folder}/{name}")
        status = None if path is None else root.stat(path)
        if path is None or status is None or not stat.S_ISREG(status.st_mode):
            continue
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


def _binaries(
    root: Rootfs, locations: Locations, version: str, libraries: list[DriverFile]
) -> "Iterator[DriverFile]":
    """Yield the driver's programs, and their dependencies that images don't have."""
    for capability, names in BINARIES.items():
        for name in names:
            path = find_program(root, name, locations, version)
            if path is not None:
                yield DriverFile("binary", path, f"/usr/bin/{name}", capability)
                own = [file for file in libraries if file.capability == capability]
                yield from _surroundings(root, path, capability, own)


def _surroundings(
    root: Rootfs, program: str, capability: str, libraries: list[DriverFile]
) -> "Iterator[DriverFile]":
    """Yield the folder of a program's own loader, and the library paths that the program uses.

    On NixOS a program is started by the loader of its C library's package, which is in the C
    library's folder and uses no cache. Elsewhere, images have everything in the usual places.
    """
    fd = root.open_file(program)
    if fd is None:
        return
    try:
        folder = os.path.dirname(elf.loader(fd, program))
        paths = [] if folder in _LOADER_FOLDERS else elf.search_path(fd, program)
    except ElfError:
        return  # a script
    finally:
        os.close(fd)
    if folder in _LOADER_FOLDERS or not folder.startswith("/"):
        return
    listed = path_policy.ListedPath(root, path_policy.plain(folder))
    try:
        root.own_folder(folder)  # protects: loader-folder
    except (OSError, UntrustedPathError):
        return
    if not listed.is_given:
        return
    yield DriverFile("folder", listed.real, folder, capability)
    for path in paths:
        place = root.real_path(path) if root.exists(path) else ""
        for file in libraries:
            if file.kind == "library" and file.path.rpartition("/")[0] == place:
                yield DriverFile(LINKED, file.path, f"{path}/{file.soname}", capability)


def _firmware(root: Rootfs, version: str) -> "Iterator[DriverFile]":
    """Yield the GSP firmware, each file in the kernel's first search folder that has it.

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
    own = os.fsdecode((root.read_file(_FIRMWARE_PARAMETER, _MAX_PARAMETER) or b"").strip())
    return [own.rstrip("/"), *folders] if own.startswith("/") else folders


def sockets() -> tuple[DriverFile, ...]:
    """Return the sockets of the driver's daemons, whether they exist or not."""
    return tuple(DriverFile(SOCKET, path, path, "utility") for path in SOCKETS)


def _feature_files(root: Rootfs) -> "Iterator[DriverFile]":
    """Yield files that features need in addition to nodes; the capability is the feature."""
    features = {device_nodes.feature_of(path) for path in device_nodes.feature_node_paths(root)}
    for path in _GDS_FILES if "gds" in features else ():
        if root.exists(path):
            yield DriverFile("config", root.real_path(path), path, "gds")


def driver_file(
    root: "Rootfs", path: str, capability: str = "", target: str = ""
) -> DriverFile | None:
    """Return a regular file below the driver root, None if there is none.

    It goes to ``target`` in a container, by default to the same path. A file that is named like a
    library but can't be loaded is an ordinary file.
    """
    fd = root.open_file(path)
    if fd is None:
        return None
    real, target = root.real_path(path), target or path
    try:
        if is_library_name(target.rpartition("/")[2]):
            library = elf.read(fd, root.path.rstrip("/") + real)
            kind = "library" if library.bits == 64 else "config"
            return DriverFile(kind, real, target, capability, library.soname)
    except ElfError:
        pass  # a list may contain any path
    finally:
        os.close(fd)
    return DriverFile("config", real, target, capability)

"""Folders below a driver root that may contain the driver, and the check of their owner.

Distributions and installers put the driver into different folders: NixOS below
/run/opengl-driver, Flatcar and Gentoo in /opt/bin, Container-Optimized OS below /var/lib/nvidia,
Bottlerocket below /usr/libexec/nvidia. config.toml can add more. Environment variables can't:
a container's files must not depend on the process that starts it.
"""

from gpuhook.base.errors import UntrustedPathError, shown
from gpuhook.base.loader.layout import triplet, triplet32
from gpuhook.vendors.nvidia.names import NAME

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from gpuhook.base.config.model import Config
    from gpuhook.base.container.rootfs import Rootfs

# NixOS: the driver's own links, and the system's programs and shared data.
_NIXOS, _NIXOS32, _NIXOS_SYSTEM = (
    "/run/opengl-driver", "/run/opengl-driver-32", "/run/current-system/sw",
)  # fmt: skip
# Systems with the whole driver in one folder: GKE's nodes, and Container-Optimized OS.
_WHOLE = ("/usr/local/nvidia", "/var/lib/nvidia")

_PROGRAMS = (
    "/usr/bin",
    "/usr/sbin",
    "/bin",
    "/sbin",
    "/usr/local/bin",
    "/usr/local/sbin",
    "/opt/bin",
    *(f"{folder}/bin" for folder in _WHOLE),
    f"{_NIXOS}/bin",
    f"{_NIXOS_SYSTEM}/bin",
)
# Folders with programs in subfolders, by branch or version of the driver (Bottlerocket).
_PROGRAM_TREES = ("/usr/libexec/nvidia",)
_TREE_LEVELS, _TREE_FOLDERS = 4, 100

# Parents of vulkan/icd.d, glvnd/egl_vendor.d and similar folders, best first.
_DATA = (
    "/etc",
    "/usr/local/share",
    "/usr/share",
    *(f"{folder}{below}" for folder in _WHOLE for below in ("", "/share", "/etc")),
    *(f"{folder}/{below}" for folder in (_NIXOS, _NIXOS32) for below in ("share", "etc")),
    f"{_NIXOS_SYSTEM}/share",
)
# In a driver root that is one folder.
_DATA_OF_FOLDER = ("/share", "")

# The settings that add folders.
PROGRAMS, DATA = "binary-search-paths", "data-search-paths"


def library_folders(machine: str, *, bits32: bool = False) -> tuple[str, ...]:
    """Return the library folders of drivers, for libraries that no ld.so.cache lists."""
    if bits32:
        folder = triplet32(machine)
        multiarch = (f"/usr/lib/{folder}", f"/usr/lib/{folder}/nvidia/current") if folder else ()
        return (*multiarch, "/usr/lib32", "/usr/lib", "/lib32", f"{_NIXOS32}/lib")
    folder = f"/usr/lib/{triplet(machine)}"
    return (
        folder,
        f"{folder}/nvidia/current",
        "/usr/lib64",
        "/usr/lib",
        f"{folder}/vdpau",
        "/usr/lib64/vdpau",
        # In a driver root that is one folder, and on systems that have such a folder.
        f"/lib/{triplet(machine)}",
        "/lib64",
        "/lib",
        *(f"{folder}/lib64" for folder in _WHOLE),
        f"{_NIXOS}/lib",
        f"{_NIXOS}/lib/vdpau",
    )


def program_paths(config: "Config", name: str) -> "Iterator[str]":
    """Yield possible paths of a program, except in folders that only ``Locations`` finds."""
    for folder in (*config.binary_search_paths, *_PROGRAMS):
        yield f"{folder}/{name}"


def data_folders(config: "Config") -> tuple[str, ...]:
    """Return the parent folders of manifests' folders, best first."""
    return (*config.data_search_paths, *_data(config.driver_root_of(NAME)))


def _data(root: str) -> tuple[str, ...]:
    return _DATA if root == "/" else (*_DATA, *_DATA_OF_FOLDER)


def program_trees() -> tuple[str, ...]:
    """Return the folders that are searched for programs at any depth."""
    return _PROGRAM_TREES


class Locations:
    """Existing folders of one driver root that root owns, without duplicates.

    ``refused`` says, a sentence each, which folders from config.toml root doesn't own.
    """

    def __init__(self, root: "Rootfs", config: "Config | None" = None) -> None:
        self._root = root
        self.refused: list[str] = []
        configured = (config.binary_search_paths, config.data_search_paths) if config else ((), ())
        self.programs = self._existing(configured[0], _PROGRAMS, PROGRAMS)
        self.trees = self._trees()
        self.data = self._existing(configured[1], _data(root.path), DATA)

    def _existing(self, configured: "Iterable[str]", usual: "Iterable[str]", key: str) -> list[str]:
        found: dict[str, str] = {}
        for folder in configured:
            try:
                # protects: configured-folders
                found.setdefault(self._root.own_folder(folder), folder)
            except UntrustedPathError:
                self.refused.append(
                    f"{key} names {shown(folder)}, which non-root users may change: containers "
                    "get nothing from there"
                )
            except OSError:
                pass  # it doesn't exist
        for folder in usual:
            real = self._own(folder)
            if real is not None:
                found.setdefault(real, folder)
        return list(found.values())

    def _own(self, folder: str) -> str | None:
        """Return a folder's real path; None if it doesn't exist, or root doesn't own it."""
        try:
            return self._root.own_folder(folder or "/")  # protects: driver-folders
        except (OSError, UntrustedPathError):
            return None

    def _trees(self) -> list[str]:
        found: list[str] = []
        waiting = [(tree, 0) for tree in _PROGRAM_TREES]
        while waiting and len(found) < _TREE_FOLDERS:
            folder, level = waiting.pop(0)
            if self._own(folder) is None:
                continue
            found.append(folder)
            if level < _TREE_LEVELS:
                names = self._root.list_folder(folder)
                waiting += [(f"{folder}/{name}", level + 1) for name in names]
        return found

    def trees_for(self, version: str) -> list[str]:
        """Return the folders of ``trees``; paths with a version or its branch come first."""
        named = {version, version.partition(".")[0]}
        return sorted(self.trees, key=lambda folder: named.isdisjoint(folder.split("/")))

    def own_file(self, path: str) -> str | None:
        """Return a file's real path; None if it doesn't exist, or root doesn't own it.

        Links are followed inside the root, and root must own each folder on the path.
        """
        try:
            return self._root.own_path(path)  # protects: driver-way
        except (OSError, UntrustedPathError):
            return None

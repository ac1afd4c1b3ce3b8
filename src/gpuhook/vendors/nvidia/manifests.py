"""Manifests, through which vendor-neutral loaders find the driver's libraries.

A manifest of Vulkan, EGL or OpenCL belongs to the driver if it names a library of the driver.
Some distributions (Fedora, RHEL, NixOS) write the library's absolute path into it, which doesn't
exist in images with another layout. A container's copy has names that its loader finds.

Sources: LoaderDriverInterface.md and LoaderLayerInterface.md of the Vulkan loader, libglvnd's
icd_enumeration.md, the specification of cl_khr_icd.
"""

import os

from gpuhook.base.oci import jsontext
from gpuhook.core.inventory.model import DriverFile
from gpuhook.vendors.nvidia.locations import data_folders
from gpuhook.vendors.nvidia.model import ALIAS, MANIFEST, MANIFEST32

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from gpuhook.base.config.model import Config
    from gpuhook.base.container.rootfs import Rootfs
    from gpuhook.vendors.nvidia.locations import Locations

CAPABILITY = "graphics"
VULKAN, EGL = "vulkan/icd.d", "glvnd/egl_vendor.d"
_OPENCL = "OpenCL/vendors"  # which compute needs as well
# Folder below a shared data folder -> its parent folder in the container.
_PLACES = {
    VULKAN: "/etc",
    "vulkan/implicit_layer.d": "/etc",
    "vulkan/explicit_layer.d": "/etc",
    "vulkansc/icd.d": "/etc",
    EGL: "/usr/share",
    "egl/egl_external_platform.d": "/usr/share",
    _OPENCL: "/etc",
}
_OWN_NAME = "nvidia"  # in the names of the driver's own manifests, with any content
# In the names of manifests that name 32-bit libraries without a path.
_NAMES32 = frozenset({"i386", "i586", "i686", "x86", "armhf", "armv7l"})
_KEY = "library_path"
_JSON, _ICD = ".json", ".icd"
_MAX_BYTES = 1 << 16  # bytes
_MOST = 1000  # names in a folder
_LEVELS = 8  # of objects and lists in a manifest


def folders(config: "Config") -> list[str]:
    """Return the folders, below the driver root, that may contain manifests."""
    return [f"{folder}/{place}" for folder in data_folders(config) for place in _PLACES]


def find(
    root: "Rootfs", locations: "Locations", libraries: list[DriverFile]
) -> tuple[list[DriverFile], set[str]]:
    """Return the driver's manifests, and the paths of the libraries that they name.

    ``libraries`` are the driver's. A manifest that names paths has ``content`` for a container.
    Each path in the host's file is a file of the kind ALIAS: the ``target`` in a container means
    ``path``.
    """
    known = _LibraryNames(root, libraries)
    found: list[DriverFile] = []
    named: set[str] = set()
    seen = set()
    for place, above in _PLACES.items():
        for folder in locations.data:
            for name in root.list_folder(f"{folder}/{place}", _MOST):
                manifest = _read(root, locations, f"{folder}/{place}", name)
                if manifest is None or (place, name) in seen:
                    continue
                manifest.look_up(known)
                if not (manifest.meant or _OWN_NAME in name.lower()):
                    continue
                seen.add((place, name))
                target = f"{above}/{place}/{name}"
                found += manifest.files(target, "compute" if place == _OPENCL else "")
                named |= {file.path for file in manifest.meant.values()}
    return list(dict.fromkeys(found)), named


class _LibraryNames:
    """The driver's libraries, by path and by the names that programs use."""

    def __init__(self, root: "Rootfs", libraries: list[DriverFile]) -> None:
        self._root = root
        self._by_path = {file.path: file for file in reversed(libraries)}
        self._by_name: dict[str, DriverFile] = {}
        for file in libraries:  # those of 64 bits come first
            for name in (file.soname, file.target):
                self._by_name.setdefault(name or file.target, file)

    def find(self, folder: str, text: str) -> DriverFile | None:
        """Return the library that a name or path in a manifest of ``folder`` means, else None."""
        if "/" in text:
            path = os.path.normpath(f"{folder}/{text}" if text[0] != "/" else text)
            if self._root.exists(path):
                return self._by_path.get(self._root.real_path(path))
        return self._by_name.get(text.rpartition("/")[2])


class _Manifest:
    """One manifest in a folder; ``meant`` has the driver's library for each of its names."""

    def __init__(self, folder: str, name: str, path: str, text: str) -> None:
        """Set its path in the folder, and its real path."""
        self._folder = folder
        self._name = name
        self._path = path
        self._text = text
        self._tree: Any = None
        self._is_json = name.endswith(_JSON)
        self.meant: dict[str, DriverFile] = {}

    def look_up(self, known: _LibraryNames) -> None:
        """Find the libraries that it names."""
        for name in self._names():
            file = known.find(self._folder, name)
            if file is not None:
                self.meant[name] = file

    def _names(self) -> "Iterator[str]":
        if not self._is_json:
            yield self._text.strip().partition("\n")[0].strip()
            return
        try:
            self._tree = jsontext.loads(self._text)
        except ValueError:
            return
        yield from _texts(self._tree)

    @property
    def _bits32(self) -> bool:
        """True if only 32-bit programs read it."""
        words = self._name.lower().split(".")
        kinds = {file.kind for file in self.meant.values()}
        return kinds == {"library32"} or not _NAMES32.isdisjoint(words)

    def files(self, target: str, also: str) -> "Iterator[DriverFile]":
        """Yield the file and its aliases, with its own capability and with ``also``, if any."""
        bits32 = self._bits32
        # With a bare name, 64-bit programs would load their own library a second time.
        changed = {name: file for name, file in self.meant.items() if bits32 or "/" in name}
        content = self._with({old: file.soname or file.target for old, file in changed.items()})
        for capability in (CAPABILITY, *([also] if also else [])):
            kind = MANIFEST32 if bits32 else MANIFEST
            yield DriverFile(kind, self._path, target, capability, content=content)
            for name, file in changed.items():
                place = name if name[0] == "/" else f"{target.rpartition('/')[0]}/{name}"
                if "/" in name:
                    yield DriverFile(ALIAS, file.path, os.path.normpath(place), capability)

    def _with(self, names: dict[str, str]) -> str:
        """Return the text with some names replaced, "" for the unchanged file of the host."""
        if not names:
            return ""
        if not self._is_json:
            [(old, new)] = names.items()
            return self._text.replace(old, new, 1)
        return jsontext.dumps(_replaced(self._tree, names)) + "\n"


def _read(root: "Rootfs", locations: "Locations", folder: str, name: str) -> _Manifest | None:
    """Return a manifest, None for a file that loaders ignore, or that root doesn't own."""
    path = locations.own_file(f"{folder}/{name}") if name.endswith((_JSON, _ICD)) else None
    if path is None:
        return None
    try:
        data = root.read_file(path, _MAX_BYTES)
    except OSError:  # it is too long
        return None
    if data is None:
        return None
    try:
        return _Manifest(folder, name, path, data.decode())
    except ValueError:
        return _Manifest(folder, name, path, "")


def _texts(tree: "Any", levels: int = _LEVELS) -> "Iterator[str]":
    """Yield the library paths in a manifest: of a driver, a layer, or several layers."""
    for each in tree if isinstance(tree, list) and levels else ():
        yield from _texts(each, levels - 1)
    for key, value in tree.items() if isinstance(tree, dict) and levels else ():
        if key == _KEY and isinstance(value, str) and value:
            yield value
        else:
            yield from _texts(value, levels - 1)


def _replaced(tree: "Any", names: dict[str, str], levels: int = _LEVELS) -> "Any":
    """Return a manifest with library paths replaced."""
    if isinstance(tree, list) and levels:
        return [_replaced(each, names, levels - 1) for each in tree]
    if not isinstance(tree, dict) or not levels:
        return tree
    return {
        key: names.get(value, value)
        if key == _KEY and isinstance(value, str)
        else _replaced(value, names, levels - 1)
        for key, value in tree.items()
    }

"""Discovery for a declared vendor below a driver root, without opening a device."""

import os
import re
import stat
from collections.abc import Iterable, Iterator
from types import ModuleType

from gpuhook.base.config.declared import DRIVER, PCI, DeclaredTable
from gpuhook.base.container.rootfs import Rootfs
from gpuhook.base.errors import DriverError, ElfError, LdCacheError, NoDriverError
from gpuhook.base.loader import elf, ldcache
from gpuhook.base.loader.layout import cache_flags
from gpuhook.base.names import machine_name
from gpuhook.core.inventory.model import Device, DeviceNode, DriverFile, Inventory
from gpuhook.vendors import path_policy
from gpuhook.vendors.declared.names import (
    DRIVER_PLACES,
    GROUPS,
    LD_CACHE,
    PCI_DEVICES,
    VFIO,
    WRITABLE,
)

_MAX_CACHE = 64 << 20
_SMALL = 1 << 12


def discover(path: str, names: ModuleType, config_file: str) -> Inventory:
    """Discover the devices below the driver root; DriverError if there is no driver.

    ``config_file`` is the configuration that names the root, for the error.
    """
    try:
        with Rootfs(path) as root:
            return _RootSearch(root, names).inventory()
    except OSError as error:
        kind = NoDriverError if isinstance(error, FileNotFoundError) else DriverError
        raise kind(
            f"{names.TITLE}'s driver root {path} can't be read: {error.strerror}",
            f"Start the driver, or correct [gpuhook] root in {config_file}",
        ) from None


class _RootSearch:
    """One search of a driver root for one table."""

    def __init__(self, root: Rootfs, names: ModuleType) -> None:
        self._root = root
        self._names = names
        self._table: DeclaredTable = names.TABLE
        self._nodes: dict[str, DeviceNode] = {}
        self._refused: dict[str, None] = {}

    def inventory(self) -> Inventory:
        numbers = self._numbers()
        if not (self._is_present() if self._table.present else numbers):
            what = self._table.present or self._table.nodes[0]
            raise NoDriverError(
                f"{self._names.TITLE}'s driver isn't loaded: there is no {what}",
                "Load it, or correct the vendor's table in config.toml",
            )
        devices = [self._device(number, place) for place, number in enumerate(numbers)]
        for path in self._table.control:
            self._note(path)
        for path in self._table.optional_nodes:
            if "{n}" not in path:
                self._note(path)
        return Inventory(
            self._names.NAME,
            self._root.path,
            "unknown",
            tuple(devices),
            tuple(self._nodes.values()),
            self._table.control,
            tuple(self._files()),
            refused=tuple(self._refused),
        )

    def _is_present(self) -> bool:
        proof = self._table.present
        if proof.startswith(PCI):
            return self._has_vendor(PCI_DEVICES)
        if proof.startswith(DRIVER):
            word = proof.removeprefix(DRIVER)
            return any(self._root.exists(place + word) for place in DRIVER_PLACES)
        return bool(path_policy.ListedPath(self._root, proof).real)

    def _has_vendor(self, folder: str) -> bool:
        """Tell whether one of a folder's PCI devices is the vendor's."""
        vendor = f"0x{self._names.PCI_VENDOR}"
        names = self._root.list_folder(folder)
        return any(self._text(f"{folder}/{name}/vendor") == vendor for name in names)

    def _text(self, path: str) -> str:
        try:
            return (self._root.read_file(path, _SMALL) or b"").decode("ascii", "replace").strip()
        except OSError:
            return ""

    # Devices ---------------------------------------------------------------------------------

    def _numbers(self) -> list[int]:
        """Return the device numbers, sorted: those of the first pattern's nodes."""
        folder, _, name = self._table.nodes[0].rpartition("/")
        before, _, after = (re.escape(part) for part in name.partition("{n}"))
        pattern = re.compile(f"{before}(0|[1-9][0-9]{{0,8}}){after}")
        found = (pattern.fullmatch(each) for each in self._root.list_folder(folder))
        numbers = sorted(int(match[1]) for match in found if match)
        return [number for number in numbers if self._is_ours(number)]

    def _is_ours(self, number: int) -> bool:
        """Tell whether a node belongs to this driver: other drivers may use its name."""
        path = self._table.nodes[0].replace("{n}", str(number))
        node = DeviceNode.of(path, self._root.stat(path))
        if node is None:
            return False
        if self._names.PCI_VENDOR and path.startswith(VFIO):
            return self._has_vendor(f"{GROUPS}/{number}/devices")
        device = f"/sys/dev/char/{node.major}:{node.minor}/device"
        if self._names.PCI_VENDOR:
            vendor = self._text(f"{device}/vendor")
            return vendor in ("", f"0x{self._names.PCI_VENDOR}")
        if self._names.DRIVER_WORDS and self._root.exists(f"{device}/driver"):
            real = self._root.real_path(f"{device}/driver")
            return real.rpartition("/")[2] in self._names.DRIVER_WORDS
        return True

    def _device(self, number: int, place: int) -> Device:
        label = str(place if self._table.numbers == "position" else number)
        paths = [path.replace("{n}", str(number)) for path in self._table.nodes]
        for path in self._table.optional_nodes:
            if "{n}" in path:
                paths += self._matching(path.replace("{n}", str(number)))
        for path in paths:
            self._note(path)
        name = f"{self._names.TYPES[0]}{label}"
        return Device(name, label, {"index": (label,), "id": (name,)}, tuple(paths))

    def _matching(self, path: str) -> list[str]:
        """Return the existing nodes of an optional pattern, in which * matches anything."""
        folder, _, name = path.rpartition("/")
        pattern = re.compile(re.escape(name).replace(r"\*", ".*"))
        found = [each for each in self._root.list_folder(folder) if pattern.fullmatch(each)]
        paths = [f"{folder}/{each}" for each in sorted(found, key=_by_numbers)]
        return [path for path in paths if DeviceNode.of(path, self._root.stat(path)) is not None]

    def _note(self, path: str) -> None:
        """Record a node, if it exists."""
        node = DeviceNode.of(path, self._root.stat(path))
        if node is not None:
            self._nodes[path] = node

    # Files -----------------------------------------------------------------------------------

    def _files(self) -> Iterator[DriverFile]:
        for path in self._table.files:
            listed = self._listed(path)
            if listed.is_given and stat.S_ISREG(listed.mode):
                yield DriverFile("file", listed.real, path)
        for path in self._table.folders:
            listed = self._listed(path)
            if listed.is_given and stat.S_ISDIR(listed.mode):
                yield DriverFile("folder", listed.real, path)
        for path in self._table.writable_folders:
            listed = self._listed(path, writable=True)
            if listed.is_given and stat.S_ISDIR(listed.mode):
                yield DriverFile(WRITABLE, listed.real, path)
        seen: set[str] = set()
        for path in self._library_paths():
            library = self._library(path)
            if library is not None and library.target not in seen:
                seen.add(library.target)
                yield library

    def _listed(self, path: str, *, writable: bool = False) -> path_policy.ListedPath:
        listed = path_policy.ListedPath(self._root, path, writable=writable)
        if listed.refusal:
            title = self._names.TITLE
            sentence = f"{title}'s table has {path}, {listed.refusal}: containers don't get it"
            self._refused[sentence] = None
        return listed

    def _library_paths(self) -> Iterator[str]:
        """Yield paths of possible libraries; of several with one name the loader's choice first."""
        for wanted in self._table.libraries:
            folder, slash, name = wanted.rpartition("/")
            pattern = re.compile(re.escape(name).replace(r"\*", ".*"))
            if slash:
                real = self._listed(folder).real
                names = self._root.list_folder(real) if real else []
                yield from (f"{folder}/{each}" for each in names if pattern.fullmatch(each))
            else:
                yield from (path for key, path in self._cached() if pattern.fullmatch(key))

    def _cached(self) -> Iterable[tuple[str, str]]:
        """Return the libraries in the driver root's cache, in the loader's order."""
        data = self._root.read_file(LD_CACHE, _MAX_CACHE)
        flags = cache_flags(machine_name(), bits32=False)
        if data is None or flags is None:
            return []
        try:
            entries = ldcache.parse(data, self._root.path.rstrip("/") + LD_CACHE).entries
        except LdCacheError:
            return []
        return [
            (os.fsdecode(entry.key), os.fsdecode(entry.value))
            for entry in entries
            if entry.hwcap == 0 and entry.flags & 0xFF00 == flags & 0xFF00
        ]

    def _library(self, path: str) -> DriverFile | None:
        """Return a library's real file; None if it isn't a 64-bit library."""
        real = self._listed(path).real
        fd = self._root.open_file(real) if real else None
        if fd is None:
            return None
        try:
            read = elf.read(fd, self._root.path.rstrip("/") + real)
        except ElfError:
            return None
        finally:
            os.close(fd)
        name = real.rpartition("/")[2]
        return DriverFile("library", real, name, "", read.soname) if read.bits == 64 else None


def _by_numbers(name: str) -> list[tuple[int, str]]:
    """Return a sort key that orders names by the numbers in them."""
    words = re.split(r"([0-9]+)", name)
    return [(int(word), "") if word.isdecimal() else (-1, word) for word in words]

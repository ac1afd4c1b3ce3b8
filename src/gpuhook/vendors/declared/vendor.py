"""The vendor of a table in config.toml, as the contract requires."""

from gpuhook.base.names import machine_name
from gpuhook.base.oci.process import EnvironmentSetting
from gpuhook.core.contract import Vendor, existing
from gpuhook.core.inventory import fingerprint
from gpuhook.vendors.declared import names as declared
from gpuhook.vendors.declared.names import DRIVER_PLACES, LD_CACHE, PCI_DEVICES, WRITABLE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import ModuleType
    from typing import Any

    from gpuhook.base.config.declared import DeclaredTable as Table
    from gpuhook.base.config.model import Config
    from gpuhook.core.contract import Grant
    from gpuhook.core.inventory.model import DeviceNode, DriverFile, Inventory
    from gpuhook.core.plan.image import Image
    from gpuhook.core.plan.operations import Operation

NUMBERS = "{n}"  # in a value of the environment: the numbers of the container's devices


class DeclaredVendor(Vendor):
    """The vendor of one table of config.toml."""

    def __init__(self, names: "ModuleType") -> None:
        self.names = names

    def of(self, names: "ModuleType") -> "DeclaredVendor":
        return DeclaredVendor(names)

    @property
    def table(self) -> "Table":
        """The vendor's table in config.toml."""
        found: Table = self.names.TABLE
        return found

    def _discover(self, config: "Config") -> "Inventory":
        from gpuhook.vendors.declared import discover  # noqa: PLC0415 - costly, and rarely needed

        return discover.discover(self.root(config), self.names, config.file)

    def driver_markers(self) -> "Sequence[str]":
        return self._proofs() or ("/dev",)

    def cache_key(self, config: "Config") -> "list[Any]":
        root = self.root(config).rstrip("/")
        table = self.table
        values = {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in table.values().items()
        }
        places = [*table.nodes, *table.optional_nodes]
        found: list[Any] = [values, fingerprint.missing(root, self._proofs())]
        for folder in sorted({path.rpartition("/")[0] for path in places}):
            names = fingerprint.names(root + folder)
            found.append([name for name in names if self._is_ours(folder, name)])
        if self.names.PCI_VENDOR:
            found.append(fingerprint.names(root + PCI_DEVICES))
        return [*found, [fingerprint.status(root + folder) for folder in self._library_folders()]]

    def _proofs(self) -> list[str]:
        """Return paths; if one of them exists, the driver is present."""
        if self.names.DRIVER_WORDS:
            [word] = self.names.DRIVER_WORDS
            return [place + word for place in DRIVER_PLACES]
        return [self.table.present] if self.table.present.startswith("/") else []

    def _is_ours(self, folder: str, name: str) -> bool:
        """Tell whether a node's name begins like one of the table's: terminals come and go."""
        return any(
            f"{folder}/{name}".startswith(path.partition("{n}")[0].partition("*")[0])
            for path in (*self.table.nodes, *self.table.optional_nodes)
        )

    def _library_folders(self) -> list[str]:
        found = {path.rpartition("/")[0] for path in self.table.libraries}
        return sorted({path or LD_CACHE for path in found})

    def volatile_paths(self, config: "Config") -> list[str]:  # noqa: ARG002
        return [*self._paths()]

    def _paths(self) -> tuple[str, ...]:
        """Return the files and folders in the table, in its order."""
        return (*self.table.files, *self.table.folders, *self.table.writable_folders)

    def warnings(self, grant: "Grant") -> list[str]:
        found = super().warnings(grant)
        there = {file.target for file in grant.inventory.files}
        for path in self._paths():
            if path not in there and not any(f" {path}, " in text for text in found):
                found.append(f"{self.names.TITLE}'s {path} doesn't exist")
        return found

    def nodes(self, grant: "Grant") -> "list[tuple[DeviceNode, str]]":
        """Return the nodes that each container gets, and the table's existing ones."""
        found = super().nodes(grant)
        fixed = [path for path in self.table.optional_nodes if "{n}" not in path]
        reason = f"control of {self.names.TITLE}'s devices"
        return [*found, *existing(dict.fromkeys(fixed, reason), grant.inventory.nodes)]

    def environment(self, grant: "Grant") -> list[EnvironmentSetting]:
        numbers = ",".join(device.label for device in grant.devices)
        pairs = (entry.partition("=") for entry in self.table.environment)
        reason = f"declared for {self.names.TITLE}"
        return [
            EnvironmentSetting(name, value.replace(NUMBERS, numbers), reason)
            for name, _, value in pairs
        ]

    def edits(self, grant: "Grant", image: "Image") -> "list[Operation]":
        from gpuhook.core.plan.operations import FILE_OPTIONS, BindFile, BindFolder  # noqa: PLC0415 - the hook's

        root, reason = grant.inventory.root, f"declared for {self.names.TITLE}"
        libraries = [file for file in grant.inventory.files if file.kind == "library"]
        found: list[Operation] = [
            BindFolder(root, file.path, file.target, reason)
            if file.kind == WRITABLE
            else BindFile(root, file.path, file.target, FILE_OPTIONS, reason)
            for file in grant.inventory.files
            if file.kind != "library"
        ]
        return [*found, *_libraries(root, libraries, image, reason)]


def _libraries(
    root: str, files: "list[DriverFile]", image: "Image", reason: str
) -> "Iterator[Operation]":
    """Yield mounts of libraries, the links that ldconfig would make, and the loader's cache."""
    from gpuhook.base.loader import layout  # noqa: PLC0415 - the hook's
    from gpuhook.core.plan.operations import FILE_OPTIONS, BindFile, Symlink, UpdateLdCache  # noqa: PLC0415 - as above

    folders: dict[str, list[tuple[str, str | None]]] = {}
    for file in files:
        folder = image.layout.folder_of(file.path, bits32=False)
        if folder is not None:
            folders.setdefault(folder, []).append((file.target, file.soname))
            yield BindFile(root, file.path, f"{folder}/{file.target}", FILE_OPTIONS, reason)
    flags = layout.cache_flags(machine_name(), bits32=False)
    entries: list[tuple[str, str, int]] = []
    for folder, known in folders.items():
        for link, name in layout.links(known).items():
            yield Symlink(f"{folder}/{link}", name, replace=True, reason=reason)
        if flags is not None:
            entries += layout.cache_entries(folder, known, flags)
    if entries and image.layout.uses_cache:
        yield UpdateLdCache(tuple(entries), reason, image.ldconfig)


VENDOR = DeclaredVendor(declared)

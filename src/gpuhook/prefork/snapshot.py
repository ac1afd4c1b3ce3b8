"""State loaded at the prefork server's start, and the check that none of it changed."""

import os
import sys

from gpuhook.base.config.loader import load
from gpuhook.base.config.model import DEFAULT_PATH, Config
from gpuhook.base.errors import GpuhookError
from gpuhook.core import contract
from gpuhook.core.cdi import parse_cache
from gpuhook.core.inventory import cache, fingerprint
from gpuhook.vendors import registry

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpuhook.core.contract import VendorRegistry


class LoadedState:
    """Configuration, inventories and CDI specs, with the identities of all files behind them."""

    def __init__(self, path: str | None, launcher: str) -> None:
        """Record the identities of all files, then load configuration and inventories.

        GpuhookError if the host has no driver, OSError if a change could be missed.
        """
        files = _our_files()
        folders = {os.path.dirname(file) for file in files}
        program = os.path.realpath("/proc/self/exe")
        # protects: own-settings
        self._seen = _identities([path or DEFAULT_PATH, launcher, program, *folders])
        self._files = _identities(files)
        if not all(fingerprint.is_settled(each) for each in (launcher, program, *folders, *files)):
            raise OSError("our own files have just changed, maybe since they were imported")
        self.config = load(path)
        self.vendors = registry.all_vendors(self.config)
        self._loaded = _load_inventories(self.config, self.vendors)
        self.inventories = {name: each.inventory for name, each in self._loaded.items()}
        self.documents = parse_cache.Documents(self.config)
        if not self.is_same_in_detail():
            raise OSError("something has changed while it was read")

    def is_same(self) -> bool:
        """Return whether configuration, our own files, inventories and host are unchanged.

        Packages and pip replace files, which changes their folders; only the folders are checked.
        """
        latest = all(each.is_latest(self.config) for each in self._loaded.values())
        return latest and _are_same(self._seen)  # protects: machine-changed

    def is_same_in_detail(self) -> bool:
        """Check each file as well; load CDI specs that have changed."""
        if not self.is_same() or not _are_same(self._files):  # protects: written-in-place
            return False
        for each in self._loaded.values():
            each.note_folders()
        self.documents.files()
        return True


def _load_inventories(
    config: Config, vendors: "VendorRegistry"
) -> dict[str, cache.LoadedInventory]:
    """Return the inventories of the vendors that this host has, by vendor.

    GpuhookError if it has none. A vendor that appears later is found by ``resolve``.
    """
    found: dict[str, cache.LoadedInventory] = {}
    failures: list[GpuhookError] = []
    for each in vendors.values():
        try:
            found[each.NAME] = _load_inventory(config, contract.load(each))
        except GpuhookError as error:
            failures.append(error)
    if not found:
        raise failures[0]
    return found


def _load_inventory(config: Config, vendor: contract.Vendor) -> cache.LoadedInventory:
    loaded = cache.load(config, vendor)
    if loaded is None:
        cache.get_inventory(config, vendor)  # saves it
        loaded = cache.load(config, vendor)
    if loaded is None:
        raise OSError("the inventory can't be saved, so nothing would notice when it changes")
    return loaded


def _our_files() -> list[str]:
    modules = [module for name, module in sys.modules.items() if name.startswith("gpuhook")]
    files = [getattr(module, "__file__", None) for module in modules]
    return sorted(file for file in files if file)


def _identities(paths: list[str]) -> dict[str, tuple[int, ...] | None]:
    return {path: fingerprint.identity(path) for path in paths}


def _are_same(seen: dict[str, tuple[int, ...] | None]) -> bool:
    return all(fingerprint.identity(path) == identity for path, identity in seen.items())

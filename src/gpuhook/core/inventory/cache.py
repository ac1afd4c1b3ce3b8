"""Saved inventories of this host below /run, one per vendor.

So the driver is asked once instead of at every start. A saved inventory is valid only while its
fingerprint is unchanged (``fingerprint``), and only if no other non-root user can have written it.
If it is stale, damaged or suspicious, one process makes it again under a lock; the others wait.
"""

import os
import time

from gpuhook.base.errors import DriverError, NoDriverError
from gpuhook.base.oci import jsontext
from gpuhook.base.state_directory import StateDirectory, digest
from gpuhook.core.inventory import fingerprint
from gpuhook.core.inventory.model import SOCKET

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Self

    from gpuhook.base.config.model import Config
    from gpuhook.base.state_directory import StateLock
    from gpuhook.core.inventory.fingerprint import InventorySource
    from gpuhook.core.inventory.model import Inventory

_TRIES = 3  # to make an inventory while nothing changes meanwhile
_LOST_SECONDS = 10.0  # how long an inventory with a lost device is valid
_SPARE = 5.0  # seconds that a waiter allows beyond a driver's own limit


def get_inventory(config: "Config", vendor: "InventorySource", *, save: bool = True) -> "Inventory":
    """Return the host's inventory of a vendor: the saved one if it is fresh, else a new one.

    A new one is saved for the next caller, unless ``save`` is off, the user lacks the rights, or
    this process sees only a part of the host's devices. DriverError if no driver works.
    """
    folder = StateDirectory.open(config.state_dir)
    if folder is None:
        return _make_unsaved(config, vendor, save=save)
    with folder:
        found = _load(folder, config, vendor)
        if found is not None:
            return found.inventory
        if not save:
            return _discover(config, vendor).inventory
        return _make_once(folder, config, vendor).inventory


def follow(
    config: "Config",
    vendor: "InventorySource",
    before: "LoadedInventory | None" = None,
    *,
    ask: bool = False,
) -> "LoadedInventory":
    """Return the host's inventory of a vendor, for callers that ask repeatedly.

    Returns ``before``, the previous result, while it is fresh. Otherwise, and always with
    ``ask``, asks the driver as ``get_inventory`` does. An answer that can't be saved is kept in
    memory only.
    """
    if before is not None and not ask and before.is_fresh(config):
        return before
    folder = StateDirectory.make(config.state_dir)
    if folder is None:
        return _discover(config, vendor)
    with folder:
        if not ask:
            return _load(folder, config, vendor) or _make_once(folder, config, vendor)
        with _QueryTurn(folder, config, vendor) as turn:
            return _make(folder, config, vendor, turn)


def refresh(config: "Config", vendor: "InventorySource") -> "Inventory":
    """Make and save a vendor's inventory again, even if the saved one is fresh.

    DriverError if no driver works, it can't be saved, or this process sees only some devices.
    """
    folder = StateDirectory.make(config.state_dir)
    if folder is None:
        raise _no_folder(config.state_dir)
    with folder, _QueryTurn(folder, config, vendor) as turn:
        made = _make(folder, config, vendor, turn)
    if made.withheld:
        raise DriverError(
            f"{made.inventory.sentence()}: nothing was saved, as a device cgroup keeps this "
            f"process from {made.withheld[0]}",
            "Run this outside of the job, container or unit that has only some of the devices",
        )
    if not made.is_saved:
        cause = f"{made.inventory.sentence()}: nothing was saved"
        raise _unwritable(cause, config.state_dir, made.problem)
    return made.inventory


def _no_folder(path: str) -> DriverError:
    """Return the error for an unusable state folder."""
    cause = f"The state folder {path} can't be used"
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        return _unwritable(cause, path, error)
    return DriverError(cause, "Run this as root, and let only root own and write to the folder")


def _unwritable(cause: str, path: str, error: OSError | None) -> DriverError:
    from gpuhook.base.host import files  # noqa: PLC0415 - only for commands

    if error is None:  # the lock, which is in that folder, couldn't be taken
        return DriverError(f"{cause}, as {path} can't be written to", "Run this as root")
    why = f"{cause}, as {path} can't be written to: {error.strerror}"
    return DriverError(why, files.remedy(error, "Run this as root"))


def saved(config: "Config", vendor: "InventorySource") -> "Inventory | None":
    """Return the saved inventory, None if there is no fresh one; asks no driver."""
    found = load(config, vendor)
    return None if found is None else found.inventory


# Making -------------------------------------------------------------------------------------


def _make_unsaved(config: "Config", vendor: "InventorySource", *, save: bool) -> "Inventory":
    folder = StateDirectory.make(config.state_dir) if save else None
    if folder is None:
        return _discover(config, vendor).inventory
    with folder:
        return _make_once(folder, config, vendor).inventory


def _make_once(
    folder: StateDirectory, config: "Config", vendor: "InventorySource"
) -> "LoadedInventory":
    """Make the inventory, or wait for the process that is making it."""
    with _QueryTurn(folder, config, vendor) as turn:
        found = _load(folder, config, vendor)
        if found is not None:
            return found
        turn.raise_failure()
        return _make(folder, config, vendor, turn)


def _make(
    folder: StateDirectory, config: "Config", vendor: "InventorySource", turn: "_QueryTurn"
) -> "LoadedInventory":
    try:
        content = _discover(config, vendor)
    except DriverError as error:
        if not vendor.withheld(config):  # else other processes may have a working driver
            turn.note_failure(error)
        raise
    content.withheld = vendor.withheld(config)
    # Other processes may see more devices than this one, with other numbers.
    if content.withheld:  # protects: part-unsaved
        return content
    content.problem = turn.problem
    if turn.lock is not None:
        try:
            folder.write_checked(_file_name(config, vendor), content.to_json())
            content.is_saved = True
        except OSError as error:
            content.problem = error
    return content


def _discover(config: "Config", vendor: "InventorySource") -> "LoadedInventory":
    """Discover the devices, again if anything changed meanwhile."""
    for _ in range(_TRIES):
        cache_key = fingerprint.of(config, vendor)
        root = vendor.root(config)
        missing = fingerprint.settled(root, fingerprint.absent(root, vendor.volatile_paths(config)))
        watched = fingerprint.watched(root, vendor.watched_paths(config))
        inventory = vendor.discover(config)
        written = (file.path for file in inventory.files if file.content)
        watched.update(fingerprint.watched(root, written))
        # A node may appear after its device: udev creates it.
        content = LoadedInventory(
            vendor, inventory, cache_key, [*missing, *inventory.missing()], watched
        )
        if fingerprint.of(config, vendor) == cache_key:
            break
    # If it keeps changing, the old fingerprint is kept: it won't match, so this isn't reused.
    return content


class _QueryTurn:
    """A turn at making the inventory, with its lock; that file also tells waiters of a failure.

    A waiter that waits longer than a driver may take continues without it (``lock`` is None).
    The lock only saves work.
    """

    def __init__(self, folder: StateDirectory, config: "Config", vendor: "InventorySource") -> None:
        self._began = time.monotonic()
        self.lock: StateLock | None = None
        self.problem: OSError | None = None
        try:
            name = _file_name(config, vendor) + ".lock"
            self.lock = folder.lock(name, config.nvml_timeout + _SPARE)
        except TimeoutError:
            pass
        except OSError as error:
            self.problem = error

    def __enter__(self) -> "Self":
        return self

    def __exit__(self, *details: object) -> None:
        if self.lock is not None:
            self.lock.close()

    def note_failure(self, error: DriverError) -> None:
        """Tell the current waiters why there is no inventory."""
        if self.lock is not None:
            absent = isinstance(error, NoDriverError)
            text = jsontext.dumps([time.monotonic(), error.cause, error.remedy, absent])
            try:
                os.ftruncate(self.lock.fd, 0)
                os.pwrite(self.lock.fd, text.encode(), 0)
            except OSError:
                pass  # a full disk: they ask the driver themselves

    def raise_failure(self) -> None:
        """Raise the failure of the process that we waited for: ours would be the same."""
        if self.lock is None:
            return
        try:
            text = os.pread(self.lock.fd, 1 << 16, 0).decode()
            moment, cause, remedy, absent = jsontext.loads(text)
        except (ValueError, TypeError, OSError):
            return
        if isinstance(moment, float) and moment > self._began:
            raise (NoDriverError if absent else DriverError)(str(cause), str(remedy))


# Loading and saving --------------------------------------------------------------------------


def _file_name(config: "Config", vendor: "InventorySource") -> str:
    """Return a file name unique for each vendor and set of settings, to avoid conflicts."""
    settings = jsontext.dumps(fingerprint.settings_of(config, vendor))
    return f"inventory-{vendor.names.NAME}-{digest(settings.encode())}"


class LoadedInventory:
    """An inventory with the data that tells whether it still describes this host.

    ``cache_key`` is its fingerprint, ``missing`` the paths that didn't exist, ``watched`` the
    statuses of files and folders. ``is_saved`` tells whether it was saved, and ``problem`` why it
    could not be. ``withheld`` are device nodes that this process may not open: then it is
    incomplete.
    """

    def __init__(
        self,
        vendor: "InventorySource",
        inventory: "Inventory",
        cache_key: "list[Any]",
        missing: list[str],
        watched: "dict[str, list[int]]",
    ) -> None:
        self.inventory = inventory
        self.cache_key = cache_key
        self.missing = missing
        self.watched = watched
        self._vendor = vendor
        self.is_saved = False
        self.problem: OSError | None = None
        self.withheld: list[str] = []
        self._file: tuple[int, ...] = ()
        self._folders: list[str] = []
        self._folders_seen: list[tuple[int, ...] | None] = []
        self._saved_at = time.time()

    def to_json(self) -> bytes:
        """Return the content of its file."""
        parts = [self.cache_key, self.missing, self.watched, self.inventory.to_json()]
        return jsontext.dumps(parts).encode()

    def read_from(self, status: os.stat_result) -> None:
        """Record the file that it was read from, and when that was written."""
        self._file = identity(status)
        self._saved_at = status.st_mtime

    def is_fresh(self, config: "Config") -> bool:
        """Tell whether it is valid: nothing has changed, and no lost device can be back."""
        # The absolute difference: the clock may have been set back since.
        if self.inventory.lost and abs(time.time() - self._saved_at) > _LOST_SECONDS:
            return False  # only the driver can tell when a lost device is back
        return self.is_same(config)

    def is_same(self, config: "Config") -> bool:
        """Tell whether nothing that it depends on has changed."""
        found = self.inventory
        return (
            self.cache_key == fingerprint.of(config, self._vendor)
            and fingerprint.same_nodes(found.root, found.nodes, self._vendor.crowded)
            and (self._folders_stayed() or not fingerprint.missing(found.root, self._files()))
            and fingerprint.missing(found.root, self.missing) == self.missing
            and fingerprint.same_statuses(found.root, self.watched)
        )

    def note_folders(self) -> None:
        """Check all files now, and from now on only their folders while those don't change.

        That takes a fifth of the time, in a process that asks often. A folder that has just changed
        may change again undetected.
        """
        folders = fingerprint.folders(self.inventory.root, self._files())
        seen = [fingerprint.identity(path) for path in folders]
        settled = all(fingerprint.is_settled(path) for path in folders)  # protects: just-changed
        if settled and not fingerprint.missing(self.inventory.root, self._files()):
            self._folders, self._folders_seen = folders, seen

    def _folders_stayed(self) -> bool:
        return bool(self._folders) and (
            [fingerprint.identity(path) for path in self._folders] == self._folders_seen
        )

    def _files(self) -> list[str]:
        # protects: sockets-age-nothing
        files = self.inventory.files
        return [
            file.path for file in files if file.kind != SOCKET and file.path not in self.watched
        ]

    def is_latest(self, config: "Config") -> bool:
        """Tell whether it is fresh, and the file that it was read from is still in place."""
        try:
            status = os.stat(
                f"{config.state_dir}/{_file_name(config, self._vendor)}", follow_symlinks=False
            )
        except OSError:
            return False
        return identity(status) == self._file and self.is_fresh(config)


def identity(status: os.stat_result) -> tuple[int, ...]:
    """Return a file's identity, which changes with the file: no user can restore all of it."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def load(config: "Config", vendor: "InventorySource") -> LoadedInventory | None:
    """Return the saved inventory and its fingerprint; None if there is no fresh one."""
    folder = StateDirectory.open(config.state_dir)
    if folder is None:
        return None
    with folder:
        return _load(folder, config, vendor)


def _load(
    folder: StateDirectory, config: "Config", vendor: "InventorySource"
) -> LoadedInventory | None:
    """Return the saved inventory, None unless it is complete, trustworthy and fresh."""
    whole = folder.read_checked(_file_name(config, vendor))
    if whole is None:
        return None
    text, status = whole
    try:
        cache_key, missing, watched, inventory = jsontext.loads(text)
        made = vendor.inventory.from_json(inventory)
        found = LoadedInventory(vendor, made, cache_key, missing, watched)
    except (ValueError, KeyError, TypeError):
        return None
    found.read_from(status)
    return found if found.is_fresh(config) else None

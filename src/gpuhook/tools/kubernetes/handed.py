"""What was handed out, to claims and by the device plugin, written down: it outlives a process.

One file for each claim and driver, in the state folder; a record is *started* before anything is
touched for its claim, and *completed* when all of it is there. One of an earlier boot counts for
nothing: nothing that was made then is there. Whoever changes records has their lock, whatever
instance of gpuhook it is: during an update two run at once.

The device plugin leaves a *lease* of each device that it gives to a container, because no claim
may have that one then. Nobody tells it when the container has ended; who is refused by a lease
asks the kubelet whether some pod has the device.

What another version of gpuhook wrote is read as far as it is known. While something can't be read
at all, nothing is handed out: it may say that a container has the device.
"""

import contextlib
import hashlib
import json
import os
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

from gpuhook.ground.errors import PluginError, RequestError, shown
from gpuhook.ground.host import files, lock
from gpuhook.start.inventory import cache
from gpuhook.start.records.leases import boot_id

FOLDER = "dra"  # in the state folder
STARTED, COMPLETED = "started", "completed"
_LOCK = "lock"
_LEASES = "device-plugin"  # the folder of leases, in that folder
_WAIT = 20  # seconds that another claim's work may take
_UID = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,63}")
_DRIVER = re.compile(r"[a-z0-9]([-a-z0-9.]{0,61}[a-z0-9])?")
_END = ".json"
_MOST = 1 << 20  # bytes of a record
_MODE = 0o600
# What reading a file may raise that is damaged, or that somebody else wrote.
_DAMAGE = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)


@dataclass(frozen=True)
class Held:
    """A device that a claim has, as one result of its allocation has it.

    ``request`` is without a subrequest, ``device`` the slice's name; ``share`` is the share's id
    where several claims may have the device at once, and ``consumed`` what of its capacity this
    one has, in bytes or pieces. ``vendor`` is ours; ``unit`` and ``whole`` are ids as the device
    plugin has them (``state.Unit``). ``cdi`` are the names that engines are given.
    """

    request: str
    pool: str
    device: str
    admin: bool = False
    share: str = ""
    consumed: dict[str, int] = field(default_factory=dict)
    vendor: str = ""
    unit: str = ""
    whole: str = ""
    cdi: tuple[str, ...] = ()


@dataclass(frozen=True)
class Lease:
    """A device that the device plugin has given to a container: ids as in ``Held``.

    ``resource`` is what the pod asked for, ``at`` the seconds from the boot on (``now``).
    """

    vendor: str
    unit: str
    whole: str
    resource: str
    boot: str
    at: float


def is_same(one: Held | Lease, other: Held | Lease) -> bool:
    """Tell whether two are one device, or one is a part of the other."""
    same = one.unit in (other.unit, other.whole) or one.whole == other.unit
    return one.vendor == other.vendor and same


@dataclass(frozen=True)
class Record:
    """A claim, and what it has of one driver; ``effects`` are to be undone, each a plain dict.

    ``at`` is when that was begun, in seconds from the boot on, and ``gone`` since when the claim
    isn't in the cluster any more, 0 where nobody has asked, or it is.
    """

    driver: str
    uid: str
    namespace: str
    name: str
    state: str
    boot: str
    devices: tuple[Held, ...] = ()
    document: str = ""
    effects: tuple[dict[str, Any], ...] = ()
    at: float = 0.0
    gone: float = 0.0

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """Rebuild from what ``asdict`` returned; ValueError, KeyError, TypeError otherwise."""
        devices = tuple(
            Held(**{**_known(Held, each), "cdi": tuple(each["cdi"])}) for each in data["devices"]
        )
        lists = {"devices": devices, "effects": tuple(data["effects"])}
        return cls(**{**_known(cls, data), **lists})

    @property
    def claim(self) -> str:
        """What to call the claim in a sentence."""
        return f"{self.namespace}/{self.name}" if self.name else f"with the uid {self.uid}"


def _known(kind: type[Any], data: dict[str, Any]) -> dict[str, Any]:
    """Return what of some data is a field: a newer version may have written more."""
    return {each.name: data[each.name] for each in fields(kind) if each.name in data}


def now() -> float:
    """Return the seconds from the boot on, whatever the clock is set to."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _read(path: str) -> dict[str, Any]:
    """Return the object in a file; one of ``_DAMAGE`` where there is none."""
    found = json.loads(files.read(path, _MOST))
    if not isinstance(found, dict):
        raise TypeError(path)
    return found


def _unreadable(path: str, whose: str) -> PluginError:
    return PluginError(
        f"{path} can't be read, which says who has devices: nothing is handed out meanwhile",
        f"Delete {whose}; remove the file if it is still there when no container of theirs runs",
    )


def remove(path: str) -> None:
    """Remove a file, and what was meant to become one; OSError where that can't be.

    For who has the lock: a temporary file of anybody who lives would go, too.
    """
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    folder, _, name = path.rpartition("/")
    _remove_remains(folder, f".{name}.")


def _remove_remains(folder: str, start: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(folder):
            if name.startswith(start):
                with contextlib.suppress(OSError):  # nobody reads them
                    os.unlink(f"{folder}/{name}")


def check_names(driver: str, uid: str) -> None:
    """Raise PluginError for what can't be in the name of a file."""
    if not _UID.fullmatch(uid) or not _DRIVER.fullmatch(driver):  # protects: dra-names
        raise PluginError(
            f"{shown(uid)} can't be the uid of a claim", "Look at the kubelet's log: it has sent it"
        )


class Records:
    """The records of this node; nothing is changed without ``locked``."""

    def __init__(self, state_dir: str) -> None:
        self._state_dir = state_dir
        self.folder = f"{state_dir}/{FOLDER}"
        self.boot = boot_id()

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep everybody else's work on claims away for a block; PluginError where that fails."""
        fd = self._open_lock()
        try:
            if not lock.take(fd, _WAIT):  # protects: dra-lock
                raise PluginError(
                    f"Another claim's work has had the lock {self.folder}/{_LOCK} for "
                    f"{_WAIT} seconds",
                    "The kubelet asks again; `lslocks` names the process",
                )
            yield
        finally:
            os.close(fd)

    def make(self) -> None:
        """Make the folder where it isn't there; PluginError where it can't be used."""
        os.close(self._open_lock())

    def _open_lock(self) -> int:
        folder = self._open_folder()
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            return os.open(_LOCK, flags, _MODE, dir_fd=folder)
        except OSError as error:
            raise self._unusable(error) from None
        finally:
            os.close(folder)

    def _open_folder(self) -> int:
        """Open our folder, made where it isn't there; PluginError where others may change it.

        In a pod it is mounted, below a folder that everybody may write to (an emptyDir): a mount
        is in nobody's hands but root's.
        """
        if not os.path.ismount(self.folder):
            self._make_folder()
        found = cache.open_folder(self.folder)  # protects: dra-folder
        if found is None:
            raise PluginError(
                f"{self.folder} can't be used, or isn't root's alone",
                "See that it is a folder of root's that nobody else may write to",
            )
        return found

    def _make_folder(self) -> None:
        above = cache.make_folder(self._state_dir)
        if above is None:
            raise PluginError(
                f"{self._state_dir} can't be used, or isn't root's alone",
                "Correct state-dir in [gpuhook]",
            )
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(FOLDER, 0o700, dir_fd=above)
        except OSError as error:
            raise self._unusable(error) from None
        finally:
            os.close(above)

    def _unusable(self, error: OSError) -> PluginError:
        remedy = files.remedy(error, "Run this as root")
        return PluginError(f"{self.folder} can't be used: {error.strerror}", remedy)

    def read(self, driver: str, uid: str) -> Record | None:
        """Return a claim's record, None where there is none that can be read.

        What one would name that can't be read is looked for by ``uid``.
        """
        try:
            found = Record.from_json(_read(self.path(driver, uid)))
        except _DAMAGE:
            return None
        is_its = (found.driver, found.uid) == (driver, uid)
        return found if is_its else None

    def is_unknown(self, driver: str, uid: str) -> bool:
        """Tell whether a record can't be read that may be of this boot."""
        if self.read(driver, uid) is not None:
            return False
        return self._may_count(self.path(driver, uid))

    def _may_count(self, path: str) -> bool:
        """Tell whether a file is there and doesn't say that it is of another boot."""
        try:
            data = _read(path)
        except FileNotFoundError:
            return False
        except _DAMAGE:
            return True
        return str(data.get("boot", self.boot)) == self.boot

    def check_readable(self, but: tuple[str, str] | None = None) -> None:
        """Raise PluginError where what claims have isn't known, ``but`` for a driver's claim."""
        for each in self.names():
            if each != but and self.is_unknown(*each):  # protects: dra-unreadable
                raise _unreadable(self.path(*each), "its claim's pods")

    def is_complete(self, record: Record | None) -> bool:
        """Tell whether all that a record names was there when it was written, since this boot."""
        return record is not None and (record.state, record.boot) == (COMPLETED, self.boot)

    def current(self) -> list[Record]:
        """Return the records of this boot that can be read."""
        found = (self.read(driver, uid) for driver, uid in self.names())
        return [each for each in found if each is not None and each.boot == self.boot]

    def names(self) -> list[tuple[str, str]]:
        """Return the driver and the uid of every record, those that can't be read among them."""
        try:
            entries = sorted(os.listdir(self.folder))
        except FileNotFoundError:
            return []
        pairs = (name.removesuffix(_END).partition("_") for name in entries if name.endswith(_END))
        return [
            (driver, uid)
            for uid, _, driver in pairs
            if _UID.fullmatch(uid) and _DRIVER.fullmatch(driver)
        ]

    def write(self, record: Record) -> None:
        """Write a record, in one step; PluginError where that fails."""
        text = json.dumps(asdict(record)).encode()
        try:
            files.replace(self.path(record.driver, record.uid), text, _MODE)
        except OSError as error:
            raise PluginError(
                f"The record of claim {record.claim} can't be written: {error.strerror}",
                files.remedy(error, "See that this disk can be written to"),
            ) from None

    def remove(self, driver: str, uid: str) -> None:
        """Remove a record that may be there, and what a write of it left that was ended.

        PluginError where that can't be.
        """
        try:
            remove(self.path(driver, uid))
        except OSError as error:
            raise self._unusable(error) from None

    def tidy(self) -> None:
        """Remove what writes left that were ended; the lock says that nobody writes now."""
        for folder in (self.folder, f"{self.folder}/{_LEASES}"):
            _remove_remains(folder, ".")

    # Leases of the device plugin --------------------------------------------------------------

    def leases(self) -> list[Lease]:
        """Return what the device plugin has given away since this boot.

        PluginError where some of that can't be read.
        """
        found = []
        with contextlib.suppress(FileNotFoundError):
            for name in sorted(os.listdir(f"{self.folder}/{_LEASES}")):
                path = f"{self.folder}/{_LEASES}/{name}"
                try:
                    lease = Lease(**_known(Lease, _read(path)))
                except _DAMAGE:
                    if name.endswith(_END) and self._may_count(path):
                        raise _unreadable(path, "the pod that it is about") from None
                    continue
                if lease.boot == self.boot:
                    found.append(lease)
        return found

    def lease(self, vendor: str, unit: str, whole: str, resource: str) -> Lease:
        """Return a lease that begins now."""
        return Lease(vendor, unit, whole, resource, self.boot, now())

    def lend(self, leases: list[Lease]) -> None:
        """Write down what the device plugin gives; RequestError where a claim has one of them.

        PluginError where that can't be written, or what claims have isn't known.
        """
        with self.locked():
            self.check_readable()
            claims = self.current()
            for lease in leases:
                for record in claims:
                    self._refuse(lease, record)
            folder = f"{self.folder}/{_LEASES}"
            try:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(folder, 0o700)
                for lease in leases:
                    path = self._lease(lease)
                    _remove_remains(folder, f".{os.path.basename(path)}.")
                    # protects: dra-lease-kept
                    files.replace(path, json.dumps(asdict(lease)).encode(), _MODE)
            except OSError as error:
                raise self._unusable(error) from None

    def _refuse(self, lease: Lease, record: Record) -> None:
        for held in record.devices:
            if not held.admin and is_same(lease, held):  # protects: dra-not-twice-plugin
                raise RequestError(
                    f"{lease.unit} is claim {record.claim}'s, which gpuhook dra gave it to",
                    "Let one of gpuhook dra and gpuhook device-plugin hand out a node's devices; "
                    "the pod can start when the claim's pods have ended",
                )

    def give_up(self, lease: Lease) -> None:
        """Forget a lease."""
        remove(self._lease(lease))

    def _lease(self, lease: Lease) -> str:
        digest = hashlib.sha256(f"{lease.vendor}/{lease.unit}".encode()).hexdigest()[:32]
        return f"{self.folder}/{_LEASES}/{digest}{_END}"

    def path(self, driver: str, uid: str) -> str:
        """Return where a claim's record is."""
        check_names(driver, uid)
        return f"{self.folder}/{uid}_{driver}{_END}"

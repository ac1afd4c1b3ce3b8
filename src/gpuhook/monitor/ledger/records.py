"""Ledger records on disk: the devices of each owner, and the settings that it changed.

There is one file per owner, all of the same form, in a folder of the state folder:

    claim_UID_DRIVER.json    the devices that a claim has from one driver (gpuhook dra)
    pod_DIGEST.json          a device that gpuhook device-plugin allocated to a pod
    mps.json                 the devices that gpuhook mps shares

A record is *started* before anything is changed for its owner, and *completed* when everything in
it exists. Records from a previous boot are ignored: everything they describe is gone. Every change
needs the lock, in every instance of gpuhook: during an update two instances run at once, and pods
mount this folder of the node.

The device plugin is not told when a container ends, so its records stay. If one of them conflicts
with a claim, the kubelet is asked whether a pod still has the device.

Unknown fields of other gpuhook versions are ignored. While a record is unreadable, no device is
allocated: the record may say that a container has it.
"""

import contextlib
import hashlib
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, NamedTuple, Self

from gpuhook.base.errors import PluginError, RequestError, shown
from gpuhook.base.host import files
from gpuhook.base.oci import jsontext
from gpuhook.base.state_directory import StateDirectory, boot_id

FOLDER = "devices"  # in the state folder; the manifests mount it
CLAIM, POD, MPS = "claim", "pod", "mps"  # owners
STARTED, COMPLETED = "started", "completed"
_LOCK = "lock"
_WAIT = 20  # seconds that another process may hold the lock
_UID = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,63}")
_DRIVER = re.compile(r"[a-z0-9]([-a-z0-9.]{0,61}[a-z0-9])?")
_END = ".json"
_MOST = 1 << 20  # bytes of a record
# Errors from reading a file that is damaged, or that another program wrote.
_DAMAGE = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
_REMEDIES = {
    CLAIM: "Delete its claim's pods; remove the file if it is still there when no container of "
    "theirs runs",
    POD: "Delete the pod that it is about; remove the file if it is still there when no container "
    "of that pod runs",
    MPS: "Run gpuhook mps stop, which removes it, and gpuhook mps start",
}


@dataclass(frozen=True)
class HeldDevice:
    """A device that belongs to an owner.

    ``vendor`` is gpuhook's name; ``unit`` and ``whole`` are ids of the device plugin
    (``state.Unit``). The other fields come from a claim's allocation result: ``request`` without
    a subrequest, ``device`` the name in the slice, ``share`` the share's id if several claims may
    use the device at once, ``consumed`` the capacity that this claim uses, in bytes or pieces.
    ``cdi`` are the CDI names that engines receive. A pod that is a client of gpuhook mps has the
    share "mps".
    """

    request: str = ""
    pool: str = ""
    device: str = ""
    admin: bool = False
    share: str = ""
    consumed: dict[str, int] = field(default_factory=dict)
    vendor: str = ""
    unit: str = ""
    whole: str = ""
    cdi: tuple[str, ...] = ()

    def shares(self, other: "HeldDevice") -> bool:
        """Return whether both are shares of a device that several claims may use."""
        both = bool(self.share and other.share)
        return both and (self.vendor, self.device) == (other.vendor, other.device)

    def conflicts(self, other: "HeldDevice") -> bool:
        """Return whether two owners can't have both: one device, or a device and its part."""
        if self.admin or other.admin or self.shares(other) or self.vendor != other.vendor:
            return False
        return self.unit in (other.unit, other.whole) or self.whole == other.unit


@dataclass(frozen=True)
class ChangedSetting:
    """A setting of a device that its owner has changed to ``value``.

    ``before`` is the original value, which is restored. ``device`` is the inventory's id, ``name``
    the vendor's name of the setting.
    """

    vendor: str
    device: str
    name: str
    before: int
    value: int


@dataclass(frozen=True)
class OwnerRecord:
    """An owner, its devices, and the changes to roll back when it releases them.

    ``effects`` are started programs, each a plain dict that its vendor defines. ``name`` is the
    claim's, or the resource that a pod requested. ``at`` is when the record was started, in
    seconds since boot. ``gone`` is when the claim was found missing from the cluster: 0 if it
    exists, or was not looked up yet.
    """

    driver: str
    uid: str
    namespace: str
    name: str
    state: str
    boot: str
    devices: tuple[HeldDevice, ...] = ()
    document: str = ""
    effects: tuple[dict[str, Any], ...] = ()
    at: float = 0.0
    gone: float = 0.0
    owner: str = CLAIM
    settings: tuple[ChangedSetting, ...] = ()

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """Rebuild from what ``asdict`` returned; ValueError, KeyError, TypeError otherwise."""
        devices = tuple(
            HeldDevice(**{**_known(HeldDevice, each), "cdi": tuple(each["cdi"])})
            for each in data["devices"]
        )
        settings = tuple(
            ChangedSetting(**_known(ChangedSetting, each)) for each in data.get("settings", ())
        )
        lists = {"devices": devices, "settings": settings, "effects": tuple(data["effects"])}
        return cls(**{**_known(cls, data), **lists})

    @property
    def key(self) -> str:
        """The record's file name."""
        words = {CLAIM: (self.uid, self.driver), POD: (self.uid,), MPS: ()}[self.owner]
        return "_".join((self.owner, *words)) + _END

    @property
    def claim(self) -> str:
        """The claim's name for messages."""
        return f"{self.namespace}/{self.name}" if self.name else f"with the uid {self.uid}"

    def __str__(self) -> str:
        """Return the owner's name for messages."""
        if self.owner == MPS:
            return "gpuhook mps"
        return f"claim {self.claim}" if self.owner == CLAIM else f"a pod that asked for {self.name}"


def _known(kind: type[Any], data: dict[str, Any]) -> dict[str, Any]:
    """Return the known fields of some data: a newer version may have written more."""
    return {each.name: data[each.name] for each in fields(kind) if each.name in data}


def now() -> float:
    """Return the seconds since boot, independent of the wall-clock time."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def in_the_way(
    wanted: Iterable[HeldDevice], records: Iterable[OwnerRecord]
) -> list[tuple[HeldDevice, HeldDevice, OwnerRecord]]:
    """Return each wanted device that another owner has: ours, theirs, and its owner's record."""
    ours = [*wanted]
    return [
        (each, other, record)
        for record in records
        for each in ours
        for other in record.devices
        if each.conflicts(other)
    ]


def check_names(driver: str, uid: str) -> None:
    """Raise PluginError for a driver or uid that can't be part of a file name."""
    if not _UID.fullmatch(uid) or not _DRIVER.fullmatch(driver):  # protects: dra-names
        raise PluginError(
            f"{shown(uid)} can't be the uid of a claim", "Look at the kubelet's log: it has sent it"
        )


class Records:
    """The records of this node; every change needs ``locked``."""

    def __init__(self, state_dir: str) -> None:
        self._state_dir = state_dir
        self.folder = f"{state_dir}/{FOLDER}"
        self.boot = boot_id()

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock on the records for a block; PluginError on failure."""
        try:
            with self._made() as folder:
                held = folder.lock(_LOCK, _WAIT)  # protects: dra-lock
        except TimeoutError:
            raise PluginError(
                f"Another process has had the lock {self.folder}/{_LOCK} for {_WAIT} seconds",
                "It is tried again; `lslocks` names the process",
            ) from None
        except OSError as error:
            raise self._unusable(error) from None
        with held:
            yield

    def make(self) -> None:
        """Create the folder if it is missing; PluginError if it can't be used."""
        try:
            self._made().close()
        except OSError as error:
            raise self._unusable(error) from None

    def _made(self) -> StateDirectory:
        """Open the folder, and create it if missing; OSError if other users may change it.

        In a pod it is a mount below a folder that all users can write to (an emptyDir): only root
        can change a mount.
        """
        if os.path.ismount(self.folder):
            return StateDirectory.opened(self.folder)
        above = StateDirectory.make(self._state_dir)
        if above is None:
            raise PluginError(
                f"{self._state_dir} can't be used, or others may write to it",
                "Correct state-dir in [gpuhook]",
            )
        with above:
            return above.folder(FOLDER, make=True)  # protects: dra-folder

    def _unusable(self, error: OSError) -> PluginError:
        remedy = "Make it a folder of root that no other user can write to, and run this as root"
        return PluginError(
            f"{self.folder} can't be used: {error.strerror}", files.remedy(error, remedy)
        )

    # Reading ----------------------------------------------------------------------------------

    def read(self, driver: str, uid: str) -> OwnerRecord | None:
        """Return a claim's record, None if it is missing or unreadable."""
        return self._load(OwnerRecord(driver, uid, "", "", "", "").key)

    def mps(self) -> OwnerRecord | None:
        """Return the record of gpuhook mps of this boot, None if there is none."""
        found = self._load(f"{MPS}{_END}")
        return found if found is not None and found.boot == self.boot else None

    def _load(self, key: str) -> OwnerRecord | None:
        """Return the record in a file if it belongs to the file's owner, else None."""
        try:
            found = OwnerRecord.from_json(self._data(key))
            is_its = found.key == key  # protects: record-owner
        except _DAMAGE:
            return None
        return found if is_its else None

    def _data(self, key: str) -> dict[str, Any]:
        """Return the JSON object in a file; raise one of ``_DAMAGE`` if there is none."""
        with StateDirectory.opened(self.folder) as folder:
            found = folder.load(key, _MOST)
        if not isinstance(found, dict):
            raise TypeError(key)
        return found

    def keys(self) -> list[str]:
        """Return the file names of all records, including unreadable ones."""
        try:
            with StateDirectory.opened(self.folder) as folder:
                entries = folder.names()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise self._unusable(error) from None
        owners = {name: name.removesuffix(_END).partition("_")[0] for name in entries}
        return [
            name
            for name, owner in owners.items()
            if owner in _REMEDIES and name.endswith(_END) and (owner != CLAIM or _names(name))
        ]

    def claims(self) -> list[tuple[str, str]]:
        """Return driver and uid of every claim's record, including unreadable ones."""
        return [found for key in self.keys() if (found := _names(key)) is not None]

    def current(self) -> list[OwnerRecord]:
        """Return the readable records of this boot."""
        found = (self._load(key) for key in self.keys())
        return [each for each in found if each is not None and each.boot == self.boot]

    def others(self, key: str) -> list[OwnerRecord]:
        """Return the current records of all owners except one."""
        return [each for each in self.current() if each.key != key]

    def is_unknown(self, driver: str, uid: str) -> bool:
        """Return whether a claim has an unreadable record that may be of this boot."""
        return self._is_unknown(OwnerRecord(driver, uid, "", "", "", "").key)

    def is_mps_unknown(self) -> bool:
        """Return whether gpuhook mps has an unreadable record that may be of this boot."""
        return self._is_unknown(f"{MPS}{_END}")

    def _is_unknown(self, key: str) -> bool:
        """Return whether a file exists, isn't a record, and doesn't name another boot."""
        if self._load(key) is not None:
            return False
        try:
            data = self._data(key)
        except FileNotFoundError:
            return False
        except _DAMAGE:
            return True
        return str(data.get("boot", self.boot)) == self.boot

    def check_readable(self, but: str = "", owners: Iterable[str] = (CLAIM, POD, MPS)) -> None:
        """Raise PluginError if an owner's record is unreadable, except the record ``but``."""
        for key in self.keys():
            owner = key.removesuffix(_END).partition("_")[0]
            # protects: dra-unreadable
            if key != but and owner in owners and self._is_unknown(key):
                raise PluginError(
                    f"{self.folder}/{key} can't be read, which records the owner of devices: no "
                    "device is allocated until that is fixed",
                    _REMEDIES[owner],
                )

    def is_complete(self, record: OwnerRecord | None) -> bool:
        """Return whether a record of this boot was completed."""
        return record is not None and (record.state, record.boot) == (COMPLETED, self.boot)

    # Writing ----------------------------------------------------------------------------------

    def write(self, record: OwnerRecord) -> None:
        """Write a record atomically; PluginError on failure."""
        text = jsontext.dumps(asdict(record)).encode()
        try:
            with StateDirectory.opened(self.folder) as folder:
                folder.replace(record.key, text, lasting=True)  # protects: dra-lease-kept
        except OSError as error:
            raise PluginError(
                f"The record of {record} can't be written: {error.strerror}",
                files.remedy(error, "See that this disk can be written to"),
            ) from None

    def forget(self, key: str) -> None:
        """Remove a record if it exists, and what a killed writer left; PluginError on failure."""
        try:
            with StateDirectory.opened(self.folder) as folder:
                folder.remove(f".{key}")
                os.unlink(key, dir_fd=folder.fd)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise self._unusable(error) from None

    def tidy(self) -> None:
        """Remove the temporary files of killed writers; the lock excludes running ones."""
        with contextlib.suppress(OSError), StateDirectory.opened(self.folder) as folder:
            for name in folder.names():
                if name.startswith("."):
                    folder.remove(name)

    # Pods of the device plugin ----------------------------------------------------------------

    def lend(self, vendor: str, resource: str, units: Iterable[tuple[str, str]]) -> None:
        """Record the device plugin's allocation to a pod; RequestError if a claim has a device.

        ``units`` are pairs of a unit's id and its whole device's. PluginError if that can't be
        written, or a claim's record is unreadable.
        """
        with self.locked():
            self.check_readable(owners=(CLAIM,))
            made = [self._of_pod(vendor, resource, *each) for each in units]
            claims = [each for each in self.current() if each.owner == CLAIM]
            wanted = [held for record in made for held in record.devices]
            for ours, _, record in in_the_way(wanted, claims):  # protects: dra-not-twice-plugin
                raise RequestError(
                    f"{ours.unit} is allocated to claim {record.claim} by gpuhook dra",
                    "Run only one of gpuhook dra and gpuhook device-plugin on a node; "
                    "the pod can start when the claim's pods have ended",
                )
            for each in made:
                self.write(each)

    def _of_pod(self, vendor: str, resource: str, unit: str, whole: str) -> OwnerRecord:
        digest = hashlib.sha256(f"{vendor}/{unit}".encode()).hexdigest()[:32]
        held = HeldDevice(vendor=vendor, unit=unit, whole=whole)
        mps = self.mps()
        if mps is not None and in_the_way([held], [mps]):
            held = replace(held, share=MPS)  # only a client of MPS can use it now
        who = ("", digest, "", resource)
        return OwnerRecord(*who, COMPLETED, self.boot, (held,), at=now(), owner=POD)


def _names(key: str) -> tuple[str, str] | None:
    """Return driver and uid from the file name of a claim's record; None for other files."""
    owner, _, rest = key.removesuffix(_END).partition("_")
    uid, _, driver = rest.partition("_")
    whole = owner == CLAIM and _UID.fullmatch(uid) and _DRIVER.fullmatch(driver)
    return (driver, uid) if whole else None


REPLICA = "::"  # between a device's id and a replica's number, in the kubelet's ids
YOUNG = 60.0  # seconds for which the kubelet's list of pods' devices may be out of date

Ids = Callable[[], AbstractSet[str] | None]  # of all devices of pods; None without an answer


class BusyDevice(NamedTuple):
    """A wanted device that a pod has or may have; ``doubt`` continues a sentence about it."""

    ours: HeldDevice
    record: OwnerRecord
    doubt: str


def first_busy(
    taken: Sequence[tuple[HeldDevice, HeldDevice, OwnerRecord]], ids: Ids
) -> BusyDevice | None:
    """Return the first device that a pod has or may have, None if all are free.

    ``taken`` is as ``in_the_way`` returns it. ``ids`` asks the kubelet, if there is a device.
    """
    known = ids() if taken else None
    for ours, held, record in taken:
        if known is None:  # protects: pods-unknown
            return BusyDevice(
                ours, record, ", and the kubelet doesn't report whether its pod ended"
            )
        is_young = 0 <= now() - record.at < YOUNG
        # protects: pods-device
        if is_young or any(each.partition(REPLICA)[0] == held.unit for each in known):
            return BusyDevice(ours, record, "")
    return None

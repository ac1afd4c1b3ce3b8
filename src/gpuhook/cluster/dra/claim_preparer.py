"""Preparing and unpreparing the devices of one claim on this node.

This runs in a child that exits afterwards, and that may be killed at any point. So a started
preparation in a claim's record is rolled back before any other work for the claim. Claims are
processed one after the other.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from gpuhook.base.errors import GpuhookError, PluginError, RequestError, shown
from gpuhook.cluster.dra import document, metadata
from gpuhook.cluster.dra.allocation_result import AllocationResult, Ref, allotted
from gpuhook.cluster.dra.device_setup import Effects
from gpuhook.cluster.dra.devices import DeviceRegistry
from gpuhook.cluster.dra.document import ClaimDevice
from gpuhook.cluster.dra.options import DraOptions
from gpuhook.cluster.dra.slices import MEMORY
from gpuhook.monitor.kubelet import DevicesInUse
from gpuhook.monitor.ledger.records import (
    CLAIM,
    COMPLETED,
    MPS,
    POD,
    STARTED,
    YOUNG,
    HeldDevice,
    OwnerRecord,
    Records,
    check_names,
    first_busy,
    in_the_way,
    now,
)

_STALE = 600.0  # seconds after which a started preparation counts as abandoned


class TakenError(RequestError):
    """An error because other claims have a device: the ``holders``."""

    def __init__(self, holders: Sequence[OwnerRecord], cause: str, remedy: str) -> None:
        super().__init__(cause, remedy)
        self.holders = holders


class ClaimGoneError(PluginError):
    """A claim that was deleted, or replaced by another one: nothing needs its devices any more."""


class Claims(Protocol):
    """The claims of a cluster.

    ``cluster.ClusterClaims`` reads them over HTTPS. Children with one thread and a time limit call
    it, so an object must stay usable after a fork.
    """

    def claim(self, namespace: str, name: str, uid: str) -> dict[str, Any]:
        """Return the API server's ResourceClaim, in a version that it serves.

        PluginError, with one sentence, if that fails in time: ClaimGoneError if the server reports
        that the claim is gone, or that another one now has its name (``uid``).
        """

    def report(self, namespace: str, name: str, uid: str, devices: list[dict[str, Any]]) -> None:
        """Write a claim's ``status.devices`` of gpuhook's drivers; a failure is only logged."""


class ClaimPreparer:
    """The preparer of claims with the host's ``devices``.

    ``in_use`` returns the kubelet's list of pods' devices, None if it doesn't answer.
    """

    def __init__(
        self,
        devices: DeviceRegistry,
        claims: Claims,
        options: DraOptions,
        in_use: Callable[[], DevicesInUse | None],
    ) -> None:
        self._devices = devices
        self._claims = claims
        self._options = options
        self._tell: Callable[[str], None] = lambda _: None
        self._in_use = in_use
        self._config = devices.config
        self._records = Records(self._config.state_dir)
        self._effects = Effects(devices)
        self._news: list[dict[str, Any]] | None = None  # for the claim's status

    def say_by(self, tell: Callable[[str], None]) -> None:
        """Send sentences for the log to ``tell``."""
        self._tell = tell

    # Prepare ----------------------------------------------------------------------------------

    def prepare(self, driver: str, ref: Ref) -> OwnerRecord:
        """Prepare a claim's devices, and return its record; GpuhookError if that fails.

        The operation is idempotent. A failed preparation is rolled back here, or by the next
        attempt if this process is killed. A completed claim keeps its devices until ``unprepare``,
        whatever fails here, because containers may use them.
        """
        uid = ref["uid"]
        check_names(driver, uid)
        record = self._completed(driver, ref)
        if record is not None and self._is_there(record):
            return record
        claim = self._claims.claim(ref["namespace"], ref["name"], uid)
        try:
            return self._prepared(driver, ref, claim)
        except TakenError as error:
            if not self._free_gone(error.holders):
                raise
        return self._prepared(driver, ref, claim)

    def _prepared(self, driver: str, ref: Ref, claim: Mapping[str, Any]) -> OwnerRecord:
        uid = ref["uid"]
        with self._records.locked():
            record = self._completed(driver, ref)
            if record is not None and self._is_there(record):
                return record
            try:
                if record is None:
                    self._undo(driver, uid)
                    record = self._give(driver, ref, claim)
                else:
                    found = self._found(driver, ref, claim)
                    record = self._renew(record, *found)  # protects: dra-completed
            except GpuhookError as error:
                self._news = _dated(self._status(uid) + _failed(claim, driver, error), claim)
                raise
            self._news = _dated(self._status(uid), claim)
            return record

    def report(self, ref: Ref) -> None:
        """Write the claim's status if it has changed.

        For several entries about one device, the last one counts, because a status has one each.
        """
        if self._news is not None:
            keys = ("driver", "pool", "device", "shareID")
            news = {tuple(each.get(key) for key in keys): each for each in self._news}
            self._claims.report(ref["namespace"], ref["name"], ref["uid"], [*news.values()])

    def _status(self, uid: str) -> list[dict[str, Any]]:
        """Return the claim's status entries of all of our drivers, which are written together."""
        every = [each for each in self._records.current() if (each.owner, each.uid) == (CLAIM, uid)]
        return [
            _device_status(
                each.driver, held.pool, held.device, held.share, "Prepared", "It was prepared"
            )
            for each in every
            if each.state == COMPLETED
            for held in each.devices
        ]

    def _completed(self, driver: str, ref: Ref) -> OwnerRecord | None:
        """Return a claim's record if it was completed; PluginError if it is another claim's."""
        record = self._records.read(driver, ref["uid"])
        if record is None or not self._records.is_complete(record):
            return None
        if (record.namespace, record.name) != (ref["namespace"], ref["name"]):
            raise PluginError(  # protects: dra-same-claim
                f"{shown(ref['namespace'])}/{shown(ref['name'])} has the uid of the claim "
                f"{record.claim}, which was prepared",
                "Two claims never have the same uid: look at the kubelet's log",
            )
        return record

    def _is_there(self, record: OwnerRecord) -> bool:
        """Tell whether a claim's CDI spec exists in the current folder, and its metadata."""
        where = document.path(self._options.cdi_folder, record.driver, record.uid)
        needed = [where]
        if self._options.device_metadata:
            requests = [each.request for each in record.devices]
            needed += metadata.paths(self._metadata(record.driver), record.uid, requests)
        there = record.document == where and all(map(os.path.exists, needed))
        return there or not record.devices

    def _metadata(self, driver: str) -> str:
        return metadata.folder(self._options.plugins, driver)

    def _found(
        self, driver: str, ref: Ref, claim: Mapping[str, Any]
    ) -> tuple[Sequence[AllocationResult], Mapping[str, str]]:
        """Return a claim's devices, and the texts of their metadata files by path."""
        found = allotted(self._devices, driver, ref, claim)
        if not self._options.device_metadata:
            return found, {}
        where = self._metadata(driver)
        return metadata.described(found, self._devices, driver, ref, claim, where)

    def _give(self, driver: str, ref: Ref, claim: Mapping[str, Any]) -> OwnerRecord:
        """Prepare a new claim; if that fails, roll it back and raise a GpuhookError.

        All checks come before the first change.
        """
        found, texts = self._found(driver, ref, claim)
        record = OwnerRecord(
            driver,
            ref["uid"],
            ref["namespace"],
            ref["name"],
            STARTED,
            self._records.boot,
            tuple(each.held for each in found),
            document.path(self._options.cdi_folder, driver, ref["uid"]) if found else "",
            at=now(),
        )
        self._check_free(record)
        self._text(driver, [each.given for each in found])  # protects: dra-document-first
        settings, effects = self._effects.planned(found, driver, ref["uid"])
        record = replace(record, settings=settings, effects=tuple(effects))
        self._records.write(record)  # protects: dra-started-first
        try:
            self._bring(record, found, texts)
            record = replace(record, state=COMPLETED)
            self._records.write(record)
        except BaseException:
            self._give_up(driver, ref["uid"])  # protects: dra-refused-undone
            raise
        return record

    def _give_up(self, driver: str, uid: str) -> None:
        """Roll back a started preparation; if that fails, the next attempt does it."""
        try:
            self._undo(driver, uid)
        except GpuhookError as error:
            self._tell(str(error))

    def _bring(
        self, record: OwnerRecord, found: Sequence[AllocationResult], texts: Mapping[str, str]
    ) -> None:
        """Make all changes of a record, and write the metadata and the CDI spec; repeatable."""
        edits = self._effects.begin(record)
        metadata.write(texts)  # before the spec that mounts them
        if found:
            made = self._text(record.driver, [_with(each.given, edits) for each in found])
            document.write(record.document, made)  # protects: dra-document

    def _text(self, driver: str, given: Sequence[ClaimDevice]) -> str:
        return document.text(driver, given, self._options, self._config) if given else ""

    def _renew(
        self, record: OwnerRecord, found: Sequence[AllocationResult], texts: Mapping[str, str]
    ) -> OwnerRecord:
        """Write the missing CDI spec of a completed claim again."""
        if tuple(each.held for each in found) != record.devices:
            raise PluginError(
                f"The claim {record.claim} now has other devices than were prepared for it",
                "The pod can start when the claim's other pods have ended",
            )
        where = document.path(self._options.cdi_folder, record.driver, record.uid)
        record = replace(record, document=where)
        self._bring(record, found, texts)
        self._records.write(record)
        return record

    # Conflicts --------------------------------------------------------------------------------

    def _check_free(self, record: OwnerRecord) -> None:
        """Raise RequestError if another owner has one of a claim's devices."""
        wanted = [each for each in record.devices if not each.admin]
        if not wanted:
            return
        self._records.check_readable(record.key)
        others = self._records.others(record.key)
        found = in_the_way(wanted, others)
        self._check_claims([(ours, each) for ours, _, each in found if each.owner == CLAIM])
        known = self._devices.look()
        withheld = {(each.driver, each.name) for each in known if each.is_withheld}
        # protects: dra-mps-named
        shared = [each.device for each in wanted if (record.driver, each.device) in withheld]
        # protects: dra-not-shared
        shared += [ours.device for ours, _, each in found if each.owner == MPS]
        if shared:
            raise RequestError(
                f"The device {shared[0]} is shared by MPS on this node (gpuhook mps)",
                "Claim another device, or remove this one from [gpuhook.mps] there",
            )
        self._check_shares(record.driver, wanted, others)
        self._check_pods([(ours, held, each) for ours, held, each in found if each.owner == POD])

    def _check_claims(self, taken: Sequence[tuple[HeldDevice, OwnerRecord]]) -> None:
        """Raise TakenError if other claims have the devices."""
        if taken:
            ours, record = taken[0]
            raise TakenError(  # protects: dra-not-twice
                list({each.key: each for _, each in taken}.values()),
                f"The device {ours.device} is claim {record.claim}'s, which was prepared for it "
                "before",
                "The pod can start when the pods of that claim have ended; where the kubelet has "
                "lost its own folder it never says so: then delete that claim, cordon this node, "
                f"and delete every pod of the namespace {record.namespace} from it: within 20 "
                "minutes the device is free",
            )

    def _check_shares(
        self, driver: str, wanted: Sequence[HeldDevice], others: Sequence[OwnerRecord]
    ) -> None:
        """Raise TakenError if the shares of a device exceed its memory."""
        every = [held for record in others for held in record.devices]
        memory = {each.name: each.memory for each in self._devices.look() if each.driver == driver}
        for ours in wanted:
            shares = [each for each in (*every, *wanted) if ours.shares(each)]
            total = sum(each.consumed.get(MEMORY, 0) for each in shares)
            if shares and total > memory.get(ours.device, 0):  # protects: dra-shares-sum
                raise TakenError(
                    [each for each in others if any(map(ours.shares, each.devices))],
                    f"The shares of {ours.device} would be {total} bytes of memory together, and "
                    f"it has {memory.get(ours.device, 0)}",
                    "The pod can start when pods with other shares of it have ended",
                )

    def _check_pods(self, taken: Sequence[tuple[HeldDevice, HeldDevice, OwnerRecord]]) -> None:
        """Raise RequestError if pods of the device plugin have the devices, as the kubelet reports.

        Devices that no pod has any more are freed.
        """
        busy = first_busy(taken, self._ids)
        if busy is not None:  # protects: dra-not-twice-claim
            raise RequestError(
                f"gpuhook device-plugin has allocated the device {busy.ours.device} to a pod as "
                f"{busy.record.name}{busy.doubt}",
                "Run only one of gpuhook dra and gpuhook device-plugin for a node's devices; "
                "the claim's pod can start when that pod has ended",
            )
        for _, _, record in taken:
            self._records.forget(record.key)

    def _ids(self) -> set[str] | None:
        used = self._in_use()
        return None if used is None else used.ids

    # Deleted claims ---------------------------------------------------------------------------

    def _free_gone(self, holders: Sequence[OwnerRecord]) -> bool:
        """Unprepare claims that were deleted from the cluster; tell whether there were any.

        A kubelet that has lost its own folder never requests that. The kubelet must report that no
        pod has the devices, and there must be no pod that it may not list. Both must hold again a
        minute later: a pod deleted by force may still run until the kubelet stops it.
        """
        used = self._in_use() if holders else None
        # protects: dra-gone-unused
        unused = [each for each in holders if used is not None and _is_unused(each, used)]
        gone = [record for record in unused if self._is_gone(record)]
        freed = False
        with self._records.locked():
            for record in holders:
                if self._records.read(record.driver, record.uid) != record:
                    continue  # it has changed since
                # protects: dra-gone-twice
                is_late = record.gone > 0 and now() - record.gone >= YOUNG
                if record not in gone:
                    if record.gone:
                        self._records.write(replace(record, gone=0.0))  # protects: dra-gone-still
                elif is_late:
                    self._undo(record.driver, record.uid)
                    self._tell(f"Claim {record.claim} was deleted from the cluster: unprepared")
                    freed = True
                elif not record.gone:
                    self._records.write(replace(record, gone=now()))
        return freed

    def _is_gone(self, record: OwnerRecord) -> bool:
        """Tell whether the API server reports that a claim has none of its prepared devices."""
        try:
            claim = self._claims.claim(record.namespace, record.name, record.uid)
        except ClaimGoneError:
            return True
        except GpuhookError:
            return False  # protects: dra-gone-said
        has = {(each.get("pool"), each.get("device")) for each in results(claim, record.driver)}
        return not any((held.pool, held.device) in has for held in record.devices)

    # Unprepare --------------------------------------------------------------------------------

    def unprepare(self, driver: str, ref: Ref) -> None:
        """Unprepare a claim's devices; no error for one without devices, or an unknown one."""
        check_names(driver, ref["uid"])
        with self._records.locked():
            had = self._records.read(driver, ref["uid"]) is not None
            self._undo(driver, ref["uid"])
            self._news = _dated(self._status(ref["uid"]), {}) if had else None

    def _undo(self, driver: str, uid: str) -> None:
        """Roll back a claim's preparation, complete or not; the record is removed last."""
        record = self._records.read(driver, uid)
        if record is not None and record.boot == self._records.boot:
            self._effects.undo(record, self._tell)
        usual = document.path(self._options.cdi_folder, driver, uid)
        for path in {usual, (record and record.document) or usual}:  # the option may have changed
            document.remove(path)
        metadata.remove(self._metadata(driver), uid)
        self._records.forget(OwnerRecord(driver, uid, "", "", "", "").key)

    def sweep(self) -> None:
        """Unprepare leftover claims: of earlier boots, abandoned ones, and deleted ones."""
        with self._records.locked():
            for driver, uid in self._records.claims():
                record = self._records.read(driver, uid)
                if record is None and self._records.is_unknown(driver, uid):
                    continue  # its containers may run; a conflicting claim gets an error
                is_old = record is None or record.boot != self._records.boot  # protects: dra-boot
                if is_old or (record is not None and _is_stale(record)):
                    try:
                        self._undo(driver, uid)
                    except GpuhookError as error:
                        self._tell(str(error))
            self._records.tidy()
            kept = {*self._records.claims()}
            for driver in self._devices.drivers():
                for uid in document.uids(self._options.cdi_folder, driver):
                    if (driver, uid) not in kept:
                        document.remove(document.path(self._options.cdi_folder, driver, uid))
                for uid in metadata.uids(self._metadata(driver)):
                    if (driver, uid) not in kept:
                        metadata.remove(self._metadata(driver), uid)
            current = [each for each in self._records.current() if each.owner == CLAIM]
            self._effects.look_after(current, self._tell)
        # Not only on conflicts: the refused claim's pod may be in the holder's namespace, and so
        # would prevent this for ever.
        self._free_gone(current)


def _is_unused(record: OwnerRecord, used: DevicesInUse) -> bool:
    """Tell whether no pod has a claim's devices, listed by the kubelet or not.

    If a user removes a claim's finalizer and deletes it, its pod keeps the devices, and the kubelet
    doesn't list all containers. So no pod of that namespace may be left: unpreparing removes the
    only record of the devices.
    """
    names = {name.partition("=")[2] for held in record.devices for name in held.cdi}
    is_listed = record.namespace in used.namespaces  # protects: dra-gone-unlisted
    return not is_listed and not names & used.ids


def _is_stale(record: OwnerRecord) -> bool:
    """Tell whether a claim's preparation was started and abandoned."""
    return record.state == STARTED and now() - record.at >= _STALE


def _with(
    given: ClaimDevice, edits: Sequence[tuple[Sequence[str], Mapping[str, list[Any]]]]
) -> ClaimDevice:
    """Return a device with the CDI edits of its changes."""
    more = {key: [*values] for key, values in given.more.items()}
    for devices, each in edits:
        for key, values in each.items() if given.device.id in devices else ():
            more.setdefault(key, []).extend(values)
    return replace(given, more=more)


def results(claim: Mapping[str, Any], driver: str) -> list[Any]:
    """Return a claim's allocation results of a driver, [] for none."""
    allocation = (claim.get("status") or {}).get("allocation") or {}
    every = (allocation.get("devices") or {}).get("results") or []
    return [each for each in every if each.get("driver") == driver]


def _failed(claim: Mapping[str, Any], driver: str, error: GpuhookError) -> list[dict[str, Any]]:
    """Return a claim's status entries for a driver's devices that couldn't be prepared."""
    words = (
        [str(each.get(key) or "") for key in ("pool", "device", "shareID")]
        for each in results(claim, driver)
    )
    return [
        _device_status(driver, pool, device, share, "NotPrepared", str(error))
        for pool, device, share in words
    ]


def _device_status(
    driver: str, pool: str, device: str, share: str, reason: str, message: str
) -> dict[str, Any]:
    ready = "True" if reason == "Prepared" else "False"
    condition = {"type": "Ready", "status": ready, "reason": reason, "message": message}
    about = {"driver": driver, "pool": pool, "device": device, "conditions": [condition]}
    return {**about, "shareID": share} if share else about


def _dated(news: list[dict[str, Any]], claim: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a claim's new status entries with their transition times.

    An unchanged condition keeps the time in ``claim``: an unchanged object triggers no watchers.
    Source: Condition of Kubernetes' meta/v1.
    """
    keys = ("driver", "pool", "device", "shareID")
    said = (claim.get("status") or {}).get("devices") or []
    before = {tuple(each.get(key) for key in keys): each for each in said}
    for each in news:
        there = before.get(tuple(each.get(key) for key in keys), {}).get("conditions") or []
        times = {
            (one.get("type"), one.get("status")): one.get("lastTransitionTime") for one in there
        }
        for condition in each["conditions"]:
            time_before = times.get((condition["type"], condition["status"]))
            condition["lastTransitionTime"] = time_before or _time()
    return news


def _time() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())

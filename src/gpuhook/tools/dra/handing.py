"""What happens to one claim on this node: its devices are prepared for containers, and put back.

Called in a child that ends afterwards, and that may be killed at any point: what a record says was
begun is undone before anything else is done for that claim. Work on claims is one after the other.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gpuhook.ground.errors import GpuhookError, PluginError, RequestError, shown
from gpuhook.tools.dra import document
from gpuhook.tools.dra.allotted import Allotted, Ref, allotted
from gpuhook.tools.dra.claims import ClaimGoneError, Claims
from gpuhook.tools.dra.devices import Devices
from gpuhook.tools.dra.document import Given
from gpuhook.tools.dra.effects import Effects
from gpuhook.tools.dra.options import Options
from gpuhook.tools.kubernetes.dra import MEMORY
from gpuhook.tools.kubernetes.state import REPLICA
from gpuhook.tools.ledger.records import (
    CLAIM,
    COMPLETED,
    MPS,
    POD,
    STARTED,
    Held,
    Record,
    Records,
    check_names,
    in_the_way,
    now,
)
from gpuhook.tools.metrics.kubelet import Used

_STALE = 600.0  # seconds after which nobody works any more on a claim that was begun
_YOUNG = 60.0  # seconds in which the kubelet may not know yet who has a device, or no longer


class TakenError(RequestError):
    """Other claims have what one wants: the ``holders``."""

    def __init__(self, holders: Sequence[Record], cause: str, remedy: str) -> None:
        super().__init__(cause, remedy)
        self.holders = holders


class Handing:
    """Prepares and unprepares claims by what ``devices`` knows.

    ``in_use`` returns which devices pods have by the kubelet, None where it doesn't say.
    """

    def __init__(
        self,
        devices: Devices,
        claims: Claims,
        options: Options,
        in_use: Callable[[], Used | None],
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
        """Give sentences for the log to ``tell`` from now on."""
        self._tell = tell

    # Prepare ----------------------------------------------------------------------------------

    def prepare(self, driver: str, ref: Ref) -> Record:
        """Return what a claim has, once all of it is there; GpuhookError where it can't be.

        The answer is the same each time. What was begun is undone where it fails, or by the next
        attempt if this process is killed. What was completed is the claim's until ``unprepare``,
        whatever fails here: containers may have it.
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

    def _prepared(self, driver: str, ref: Ref, claim: Mapping[str, Any]) -> Record:
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
                    found = allotted(self._devices, driver, ref, claim)
                    record = self._renew(record, found)  # protects: dra-completed
            except GpuhookError as error:
                self._news = _dated(self._status(uid) + _failed(claim, driver, error), claim)
                raise
            self._news = _dated(self._status(uid), claim)
            return record

    def report(self, ref: Ref) -> None:
        """Write into the claim's status what has become of it, if that is anything new.

        Of several words on one device the last ones count, as a status has one entry for each.
        """
        if self._news is not None:
            keys = ("driver", "pool", "device", "shareID")
            news = {tuple(each.get(key) for key in keys): each for each in self._news}
            self._claims.report(ref["namespace"], ref["name"], ref["uid"], [*news.values()])

    def _status(self, uid: str) -> list[dict[str, Any]]:
        """Return what the claim's status says of our drivers: all of them, as one writes all."""
        every = [each for each in self._records.current() if (each.owner, each.uid) == (CLAIM, uid)]
        return [
            _device_status(
                each.driver, held.pool, held.device, held.share, "Prepared", "It was prepared"
            )
            for each in every
            if each.state == COMPLETED
            for held in each.devices
        ]

    def _completed(self, driver: str, ref: Ref) -> Record | None:
        """Return a claim's record if it was completed; PluginError where that is another claim."""
        record = self._records.read(driver, ref["uid"])
        if record is None or not self._records.is_complete(record):
            return None
        if (record.namespace, record.name) != (ref["namespace"], ref["name"]):
            raise PluginError(  # protects: dra-same-claim
                f"{shown(ref['namespace'])}/{shown(ref['name'])} has the uid of the claim "
                f"{record.claim}, which was prepared",
                "Two claims never have one uid: look at the kubelet's log",
            )
        return record

    def _is_there(self, record: Record) -> bool:
        """Tell whether engines find what a claim has; their folder may be another by now."""
        where = document.path(self._options.cdi_folder, record.driver, record.uid)
        return not record.devices or (record.document == where and os.path.exists(where))

    def _give(self, driver: str, ref: Ref, claim: Mapping[str, Any]) -> Record:
        """Do all that a claim needs; a GpuhookError where that can't be, and nothing has changed.

        All that may refuse it is asked before anything is done.
        """
        found = allotted(self._devices, driver, ref, claim)
        record = Record(
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
            self._bring(record, found)
            record = replace(record, state=COMPLETED)
            self._records.write(record)
        except BaseException:
            self._give_up(driver, ref["uid"])  # protects: dra-refused-undone
            raise
        return record

    def _give_up(self, driver: str, uid: str) -> None:
        """Undo what was begun; what can't be undone now is undone by the next attempt."""
        try:
            self._undo(driver, uid)
        except GpuhookError as error:
            self._tell(str(error))

    def _bring(self, record: Record, found: Sequence[Allotted]) -> None:
        """Do all that a record says; what is done already is done again."""
        edits = self._effects.begin(record)
        if found:
            made = self._text(record.driver, [_with(each.given, edits) for each in found])
            document.write(record.document, made)  # protects: dra-document

    def _text(self, driver: str, given: Sequence[Given]) -> str:
        return document.text(driver, given, self._options, self._config) if given else ""

    def _renew(self, record: Record, found: Sequence[Allotted]) -> Record:
        """Write the document of a claim again that was completed: it isn't where it should be."""
        if tuple(each.held for each in found) != record.devices:
            raise PluginError(
                f"The claim {record.claim} has other devices by now than were prepared for it",
                "The pod can start when the claim's other pods have ended",
            )
        where = document.path(self._options.cdi_folder, record.driver, record.uid)
        record = replace(record, document=where)
        self._bring(record, found)
        self._records.write(record)
        return record

    # Who has it already -----------------------------------------------------------------------

    def _check_free(self, record: Record) -> None:
        """Raise RequestError where another owner has one of a claim's devices."""
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
                "Claim another device, or leave this one out of [gpuhook.mps] there",
            )
        self._check_shares(record.driver, wanted, others)
        self._check_pods([(ours, held, each) for ours, held, each in found if each.owner == POD])

    def _check_claims(self, taken: Sequence[tuple[Held, Record]]) -> None:
        """Raise TakenError where other claims have devices."""
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

    def _check_shares(self, driver: str, wanted: Sequence[Held], others: Sequence[Record]) -> None:
        """Raise TakenError where the shares of a device are more than it has of memory."""
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

    def _check_pods(self, taken: Sequence[tuple[Held, Held, Record]]) -> None:
        """Raise RequestError where pods of the device plugin have devices, by the kubelet's word.

        What no pod has any more is free.
        """
        used = self._in_use() if taken else None
        for ours, held, record in taken:
            # protects: dra-not-twice-claim
            if used is None or self._is_used(record, held.unit, used.ids):
                because = ", and the kubelet doesn't say whether its pod has ended" * (used is None)
                raise RequestError(
                    f"gpuhook device-plugin has given the device {ours.device} to a pod as "
                    f"{record.name}{because}",
                    "Let one of gpuhook dra and gpuhook device-plugin hand out a node's devices; "
                    "the claim's pod can start when that pod has ended",
                )
        for _, _, record in taken:
            self._records.forget(record.key)

    def _is_used(self, record: Record, unit: str, used: set[str]) -> bool:
        """Tell whether a pod has a device plugin's unit, or a replica, or may be about to."""
        is_young = 0 <= now() - record.at < _YOUNG
        return is_young or any(each.partition(REPLICA)[0] == unit for each in used)

    # Whose claim is gone ----------------------------------------------------------------------

    def _free_gone(self, holders: Sequence[Record]) -> bool:
        """Put back what claims have that aren't in the cluster any more; tell whether any was.

        A kubelet that has lost its own folder never asks for that. Only where the kubelet says
        that no pod has their devices, nor may have them without its saying so, and only where all
        that is so a minute later, too: a pod that was deleted by force may still run, and the
        kubelet ends what it doesn't know.
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
                is_late = record.gone > 0 and now() - record.gone >= _YOUNG
                if record not in gone:
                    if record.gone:
                        self._records.write(replace(record, gone=0.0))  # protects: dra-gone-still
                elif is_late:
                    self._undo(record.driver, record.uid)
                    self._tell(f"Claim {record.claim} is gone from the cluster: it is put back")
                    freed = True
                elif not record.gone:
                    self._records.write(replace(record, gone=now()))
        return freed

    def _is_gone(self, record: Record) -> bool:
        """Tell whether the cluster says that a claim has nothing of what was prepared for it."""
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
        """Put back all that a claim has; one that has nothing, or that nobody knows, is well."""
        check_names(driver, ref["uid"])
        with self._records.locked():
            had = self._records.read(driver, ref["uid"]) is not None
            self._undo(driver, ref["uid"])
            self._news = _dated(self._status(ref["uid"]), {}) if had else None

    def _undo(self, driver: str, uid: str) -> None:
        """Undo what was begun for a claim, as far as it came; the record goes last."""
        record = self._records.read(driver, uid)
        if record is not None and record.boot == self._records.boot:
            self._effects.undo(record, self._tell)
        usual = document.path(self._options.cdi_folder, driver, uid)
        for path in {usual, (record and record.document) or usual}:  # the option may have changed
            document.remove(path)
        self._records.forget(Record(driver, uid, "", "", "", "").key)

    def sweep(self) -> None:
        """Undo what nobody else is going to: of earlier boots, begun long ago or half, and gone."""
        with self._records.locked():
            for driver, uid in self._records.claims():
                record = self._records.read(driver, uid)
                if record is None and self._records.is_unknown(driver, uid):
                    continue  # its containers may run; whoever is refused for it is told
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
            current = [each for each in self._records.current() if each.owner == CLAIM]
            self._effects.look_after(current, self._tell)
        # Whoever asks may have a pod in the holder's namespace, and so would never be heard.
        self._free_gone(current)


def _is_unused(record: Record, used: Used) -> bool:
    """Tell whether no pod has a claim's devices, nor may have them without the kubelet's saying so.

    Whoever takes the finalizer off his claim and deletes it keeps what his pod has of it, and the
    kubelet doesn't list all containers. So no pod of that namespace may be left, whoever asks: to
    put it back is to lose the only record of it.
    """
    names = {name.partition("=")[2] for held in record.devices for name in held.cdi}
    is_listed = record.namespace in used.namespaces  # protects: dra-gone-unlisted
    return not is_listed and not names & used.ids


def _is_stale(record: Record) -> bool:
    """Tell whether a claim was begun, and nobody has come to end that."""
    return record.state == STARTED and now() - record.at >= _STALE


def _with(given: Given, edits: Sequence[tuple[Sequence[str], Mapping[str, list[Any]]]]) -> Given:
    """Return a device with the edits of what was done to it."""
    more = {key: [*values] for key, values in given.more.items()}
    for devices, each in edits:
        for key, values in each.items() if given.device.id in devices else ():
            more.setdefault(key, []).extend(values)
    return replace(given, more=more)


def results(claim: Mapping[str, Any], driver: str) -> list[Any]:
    """Return what a claim is allocated of a driver, [] where it isn't."""
    allocation = (claim.get("status") or {}).get("allocation") or {}
    every = (allocation.get("devices") or {}).get("results") or []
    return [each for each in every if each.get("driver") == driver]


def _failed(claim: Mapping[str, Any], driver: str, error: GpuhookError) -> list[dict[str, Any]]:
    """Return what a claim's status says of the devices of a driver that it can't have."""
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
    """Return what a claim's status will say, with the time from which on it has been so.

    That is what ``claim`` has where its condition was the same: an object that isn't changed wakes
    nobody up. Source: Condition of Kubernetes' meta/v1.
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

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
from gpuhook.tools.dra.claims import Claims
from gpuhook.tools.dra.devices import Devices, Known
from gpuhook.tools.dra.document import Given
from gpuhook.tools.dra.options import Options
from gpuhook.tools.kubernetes.handed import (
    COMPLETED,
    STARTED,
    Held,
    Lease,
    Record,
    Records,
    check_names,
    is_same,
)
from gpuhook.tools.kubernetes.state import REPLICA
from gpuhook.tools.vendors import cluster

_STALE = 600.0  # seconds after which nobody works any more on a claim that was begun
_YOUNG = 60.0  # seconds in which the kubelet may not know yet who has a device
_TRY_AGAIN = "The kubelet tries again; if it goes on, delete the pod, so that it gets other devices"

Ref = Mapping[str, str]  # namespace, name and uid of a claim


class Handing:
    """Prepares and unprepares claims by what ``devices`` knows.

    ``in_use`` returns the ids of devices that pods have by the kubelet, None where it doesn't say.
    """

    def __init__(
        self,
        devices: Devices,
        claims: Claims,
        options: Options,
        in_use: Callable[[], set[str] | None],
    ) -> None:
        self._devices = devices
        self._claims = claims
        self._options = options
        self._tell: Callable[[str], None] = lambda _: None
        self._in_use = in_use
        self._config = devices.config
        self._records = Records(self._config.state_dir)

    def say_by(self, tell: Callable[[str], None]) -> None:
        """Give sentences for the log to ``tell`` from now on."""
        self._tell = tell

    # Prepare ----------------------------------------------------------------------------------

    def prepare(self, driver: str, ref: Ref) -> Record:
        """Return what a claim has, once all of it is there; GpuhookError where it can't be.

        The answer is the same each time. What was begun stays until the next attempt undoes it.
        """
        uid = ref["uid"]
        check_names(driver, uid)
        record = self._records.read(driver, uid)
        if record is not None and self._is_there(record):
            return record
        claim = self._claims.claim(ref["namespace"], ref["name"], uid)
        with self._records.locked():
            record = self._records.read(driver, uid)
            if record is not None and self._is_there(record):
                return record
            self._undo(driver, uid)
            return self._give(driver, ref, claim)

    def _is_there(self, record: Record) -> bool:
        complete = self._records.is_complete(record)
        return complete and (not record.document or os.path.exists(record.document))

    def _give(self, driver: str, ref: Ref, claim: Mapping[str, Any]) -> Record:
        held = self._held(driver, ref, claim)
        self._check_free(driver, ref["uid"], held)
        where = document.path(self._options.cdi_folder, driver, ref["uid"])
        record = Record(
            driver,
            ref["uid"],
            ref["namespace"],
            ref["name"],
            STARTED,
            self._records.boot,
            tuple(each for each, _ in held),
            where if held else "",
        )
        self._records.write(record)  # protects: dra-started-first
        if held:
            given = [each for _, each in held]
            document.write(where, driver, given, self._options, self._config)
        record = replace(record, state=COMPLETED)
        self._records.write(record)
        return record

    def _held(self, driver: str, ref: Ref, claim: Mapping[str, Any]) -> list[tuple[Held, Given]]:
        """Return what a claim was allocated of a driver, with the devices that these are."""
        known = {each.name: each for each in self._devices.look() if each.driver == driver}
        pool = self._devices.choices.pool or self._devices.choices.node
        found = []
        for result in _results(claim, driver, ref):
            name = str(result.get("device"))
            if result.get("pool") != pool:
                raise PluginError(
                    f"The claim was allocated {shown(name)} of the pool "
                    f"{shown(str(result.get('pool')))}, and this node's is {pool}",
                    "Start gpuhook dra with the --pool and --node that it published devices with",
                )
            found.append(self._one(driver, ref["uid"], result, known.get(name)))
        return found

    def _one(
        self, driver: str, uid: str, result: Mapping[str, Any], known: Known | None
    ) -> tuple[Held, Given]:
        """Return one device of a claim; PluginError where it can't be given."""
        if known is None or known.device is None or known.is_lost:  # protects: dra-lost
            why = "isn't here" if known is None else "can't be reached any more"
            name = shown(str(result.get("device")))
            raise PluginError(f"The device {name} of {driver} {why}", _TRY_AGAIN)
        failure = self._devices.failure(known)
        if failure:  # protects: dra-hangs
            raise PluginError(f"The device {known.name} can't be given now: {failure}", _TRY_AGAIN)
        share = str(result.get("shareID") or "")
        vendor, inventory = self._devices.found(known)
        answers = cluster.of(vendor.names)
        by_id = {each.id: each for each in inventory.devices}
        name = f"{uid}-{known.name}{f'-{share}' if share else ''}"
        held = Held(
            str(result.get("request", "")).partition("/")[0],
            str(result.get("pool")),
            known.name,
            admin=result.get("adminAccess") is True,
            share=share,
            vendor=known.vendor,
            unit=answers.id(known.device),
            whole=answers.id(by_id.get(known.parent, known.device)),
            cdi=(f"{document.kind(driver)}={name}",),
        )
        return held, Given(name, known.device, vendor, inventory)

    # Who has it already -----------------------------------------------------------------------

    def _check_free(self, driver: str, uid: str, held: Sequence[tuple[Held, Given]]) -> None:
        """Raise RequestError where another claim, or the device plugin, has one of the devices."""
        wanted = [each for each, _ in held if not each.admin]
        for record in self._records.every():
            if record.boot != self._records.boot or (record.driver, record.uid) == (driver, uid):
                continue
            for theirs in record.devices:
                for ours in wanted:
                    if not theirs.admin and not _shares(ours, theirs) and is_same(ours, theirs):
                        raise RequestError(  # protects: dra-not-twice
                            f"The device {ours.device} is claim {record.claim}'s, which was "
                            "prepared for it before",
                            "The pod can start when the pods of that claim have ended",
                        )
        self._check_leases(wanted)

    def _check_leases(self, wanted: Sequence[Held]) -> None:
        leases = self._records.leases()
        wished = [(ours, each) for each in leases for ours in wanted if is_same(ours, each)]
        if not wished:
            return
        used = self._in_use()
        for ours, lease in wished:
            if used is None or self._is_used(lease, used):  # protects: dra-not-twice-claim
                because = ", and the kubelet doesn't say whether its pod has ended" * (used is None)
                raise RequestError(
                    f"gpuhook device-plugin has given the device {ours.device} to a pod as "
                    f"{lease.resource}{because}",
                    "Let one of gpuhook dra and gpuhook device-plugin hand out a node's devices; "
                    "the claim's pod can start when that pod has ended",
                )
        for _, lease in wished:
            self._records.give_up(lease)

    def _is_used(self, lease: Lease, used: set[str]) -> bool:
        """Tell whether a pod has what was leased, or a replica of it, or may be about to."""
        is_young = 0 <= time.time() - lease.at < _YOUNG
        return is_young or any(each.partition(REPLICA)[0] == lease.unit for each in used)

    # Unprepare --------------------------------------------------------------------------------

    def unprepare(self, driver: str, ref: Ref) -> None:
        """Put back all that a claim has; one that has nothing, or that nobody knows, is well."""
        check_names(driver, ref["uid"])
        with self._records.locked():
            self._undo(driver, ref["uid"])

    def _undo(self, driver: str, uid: str) -> None:
        """Undo what was begun for a claim, as far as it came; the record goes last."""
        document.remove(document.path(self._options.cdi_folder, driver, uid))
        self._records.remove(driver, uid)

    def sweep(self) -> None:
        """Undo what nobody else is going to: of earlier boots, and begun long ago or half."""
        with self._records.locked():
            for driver, uid in self._records.names():
                record = self._records.read(driver, uid)
                if record is None or record.boot != self._records.boot or self._is_stale(record):
                    try:
                        self._undo(driver, uid)
                    except GpuhookError as error:
                        self._tell(str(error))
            self._records.tidy()
            kept = {*self._records.names()}
            for driver in self._devices.drivers():
                for uid in document.uids(self._options.cdi_folder, driver):
                    if (driver, uid) not in kept:
                        document.remove(document.path(self._options.cdi_folder, driver, uid))

    def _is_stale(self, record: Record) -> bool:
        if record.state == COMPLETED:
            return False
        return self._records.age(record) >= _STALE


def _shares(one: Held, other: Held) -> bool:
    """Tell whether both are shares of a device that several claims may have."""
    return bool(one.share and other.share) and one.device == other.device


def _results(claim: Mapping[str, Any], driver: str, ref: Ref) -> list[Mapping[str, Any]]:
    """Return what a claim was allocated of a driver; PluginError where that isn't said."""
    uid = (claim.get("metadata") or {}).get("uid")
    if uid != ref["uid"]:  # protects: dra-uid
        raise PluginError(
            f"The claim {ref['namespace']}/{ref['name']} is another one by now: its uid is "
            f"{shown(str(uid))}, and the kubelet asks for {ref['uid']}",
            "The kubelet starts the new claim's pod by itself",
        )
    allocation = (claim.get("status") or {}).get("allocation")
    if not isinstance(allocation, dict):
        raise PluginError(
            f"The claim {ref['namespace']}/{ref['name']} has no allocation",
            "Look at `kubectl describe resourceclaim`; the scheduler allocates devices",
        )
    results = (allocation.get("devices") or {}).get("results") or []
    return [each for each in results if each.get("driver") == driver]

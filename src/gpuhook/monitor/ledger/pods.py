"""Check whether pods still have the devices that gpuhook device-plugin recorded for them."""

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from gpuhook.monitor.ledger.records import Held, Record, now

REPLICA = "::"  # between a device's id and a replica's number, in the kubelet's ids
YOUNG = 60.0  # seconds for which the kubelet's list of pods' devices may be out of date

Ids = Callable[[], AbstractSet[str] | None]  # of all devices of pods; None without an answer


class Busy(NamedTuple):
    """A wanted device that a pod has or may have; ``doubt`` continues a sentence about it."""

    ours: Held
    record: Record
    doubt: str


def first_busy(taken: Sequence[tuple[Held, Held, Record]], ids: Ids) -> Busy | None:
    """Return the first device that a pod has or may have, None if all are free.

    ``taken`` is as ``in_the_way`` returns it. ``ids`` asks the kubelet, if there is a device.
    """
    known = ids() if taken else None
    for ours, held, record in taken:
        if known is None:  # protects: pods-unknown
            return Busy(ours, record, ", and the kubelet doesn't report whether its pod ended")
        is_young = 0 <= now() - record.at < YOUNG
        # protects: pods-device
        if is_young or any(each.partition(REPLICA)[0] == held.unit for each in known):
            return Busy(ours, record, "")
    return None

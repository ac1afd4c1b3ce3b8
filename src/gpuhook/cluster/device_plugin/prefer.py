"""The response to GetPreferredAllocation: the free devices that suit a container best.

Whole devices are chosen by their proximity to each other. Replicas and partitions are either
spread over the devices or packed onto few. Pure and deterministic.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from math import comb

from gpuhook.base.errors import RequestError
from gpuhook.cluster.device_plugin.settings import Settings
from gpuhook.cluster.device_plugin.state import Resource, Unit

_MOST_SETS = 20_000  # combinations to compare one by one; choosing 8 of 16 devices has 12,870
_LINK = 1 << 20  # the weight of a link: more than any number of devices on the same NUMA node
_PACKED = "packed"


def prefer(
    resource: Resource,
    available: Sequence[str],
    must_include: Sequence[str],
    size: int,
    settings: Settings,
) -> list[str]:
    """Return the best ``size`` of the ids ``available``, with all of ``must_include`` among them.

    Those come first. Ids that the resource doesn't have are skipped. RequestError if there are too
    few.
    """
    offers = resource.offers()
    must = [each for each in dict.fromkeys(must_include) if each in offers][: max(size, 0)]
    wanted = {*available} - {*must}
    free = [each for each in offers if each in wanted]
    needed = size - len(must)
    usable = [each for each in free if not offers[each].reason]
    if len(usable) < needed:
        # The kubelet's list may be older than ours: Allocate then reports the precise error.
        usable = free
    if len(usable) < needed:
        raise RequestError(
            f"{size} of {resource.name} are requested, and {len(must) + len(usable)} are free",
            "Ask for fewer, or wait until other pods have ended",
        )
    if needed <= 0:
        return must
    if resource.replicas > 1 or any(unit.whole != unit.id for unit in resource.units):
        packed = settings.shared_devices_allocation_policy == _PACKED
        return must + _one_by_one(resource, usable, needed, packed)
    near = _Nearness(resource)
    return must + near.best(must, usable, needed)


# Whole devices --------------------------------------------------------------------------------


class _Nearness:
    """The proximity of devices to each other: by their links, then by their NUMA node.

    A device's position in the list decides between equals.
    """

    def __init__(self, resource: Resource) -> None:
        self._units = {unit.id: unit for unit in resource.units}
        self._links = resource.links

    def best(self, must: list[str], free: list[str], needed: int) -> list[str]:
        """Return the devices to take in addition to those in ``must``."""
        if needed == len(free):
            return free
        scores = {
            (one, other): self._score(self._units[one], self._units[other])
            for one in free
            for other in (*must, *free)
            if one != other
        }
        alone = {one: sum(scores[one, other] for other in must) for one in free}
        if comb(len(free), needed) > _MOST_SETS:
            return _grown(free, needed, scores, alone)

        def worth(devices: tuple[str, ...]) -> int:
            pairs = sum(map(scores.__getitem__, combinations(devices, 2)))
            return pairs + sum(map(alone.__getitem__, devices))

        # Of equals, max takes the first, and combinations come in the list's order.
        return [*max(combinations(free, needed), key=worth)]

    def _score(self, one: Unit, other: Unit) -> int:
        there = self._links.get(one.whole, {}).get(other.whole, 0)
        back = self._links.get(other.whole, {}).get(one.whole, 0)
        same = one.numa is not None and one.numa == other.numa
        return max(there, back) * _LINK + same


def _grown(
    free: list[str], needed: int, scores: dict[tuple[str, str], int], alone: dict[str, int]
) -> list[str]:
    """Return a good set if there are too many to compare: the best of those grown from each device.

    A set grows by the device that is nearest to its current devices.
    """
    best: list[str] = []
    most = -1
    for start in free:
        taken, worth = [start], alone[start]
        gains = {one: alone[one] + scores[one, start] for one in free if one != start}
        while len(taken) < needed:
            nearest = max(gains, key=gains.__getitem__)
            worth += gains.pop(nearest)
            taken.append(nearest)
            gains = {one: gain + scores[one, nearest] for one, gain in gains.items()}
        if worth > most:
            best, most = taken, worth
    return [each for each in free if each in best]


# Replicas and parts ---------------------------------------------------------------------------


def _one_by_one(resource: Resource, free: list[str], needed: int, packed: bool) -> list[str]:
    """Return ids, each from the device with the most ids in use (packed), or the fewest.

    Equal devices take turns. The device itself counts first, then the whole device of a partition.
    """
    offers = resource.offers()
    rest: dict[str, list[str]] = {}  # a device -> its ids that are free
    used: Counter[tuple[str, str]] = Counter()
    picked: Counter[tuple[str, str]] = Counter()
    is_free = {*free}
    for each, unit in offers.items():
        if each in is_free:
            rest.setdefault(unit.id, []).append(each)
        else:
            used.update(_keys(unit))
    units = [unit for unit in resource.units if unit.id in rest]
    sign = -1 if packed else 1

    def rank(unit: Unit) -> tuple[int, ...]:
        device, whole = _keys(unit)
        return sign * used[device], picked[device], sign * used[whole], picked[whole]

    found = []
    for _ in range(needed):
        unit = min(units, key=rank)
        found.append(rest[unit.id].pop(0))
        if not rest[unit.id]:
            units.remove(unit)
        used.update(_keys(unit))
        picked.update(_keys(unit))
    return found


def _keys(unit: Unit) -> tuple[tuple[str, str], tuple[str, str]]:
    """Return the counter keys of a device and of the whole device that it is a part of."""
    return ("device", unit.id), ("whole", unit.whole)

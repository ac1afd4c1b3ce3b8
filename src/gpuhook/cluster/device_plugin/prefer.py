"""The response to GetPreferredAllocation: the free devices that suit a container best.

Whole devices are chosen by their proximity to each other. Replicas and partitions are either
spread over the devices or packed onto few. Pure and deterministic.
"""

from collections import Counter
from collections.abc import Sequence

from gpuhook.base.errors import RequestError
from gpuhook.cluster.device_plugin.settings import Settings
from gpuhook.cluster.device_plugin.state import Resource, Unit
from gpuhook.core.inventory import nearness

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
    return must + _best(resource, must, usable, needed)


# Whole devices --------------------------------------------------------------------------------


def _best(resource: Resource, must: list[str], free: list[str], needed: int) -> list[str]:
    """Return the devices to take in addition to those in ``must``, the nearest ones.

    Devices are near by their links, then by their NUMA node.
    """
    units = {unit.id: unit for unit in resource.units}
    links = resource.links

    def score(first: str, second: str) -> int:
        one, other = units[first], units[second]
        there = links.get(one.whole, {}).get(other.whole, 0)
        back = links.get(other.whole, {}).get(one.whole, 0)
        same = one.numa is not None and one.numa == other.numa
        return max(there, back) * _LINK + same

    return nearness.best(must, free, needed, score)


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

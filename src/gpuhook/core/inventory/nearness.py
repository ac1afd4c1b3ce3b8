"""Selection of devices that are near to each other, from scores of each pair.

The device plugin's scores are links and NUMA nodes, those of a start (``records.choice``) the
place in the PCI tree. Pure and deterministic.
"""

from itertools import combinations
from math import comb

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_MOST_SETS = 20_000  # combinations to compare one by one; choosing 8 of 16 devices has 12,870


def best(
    must: list[str], free: list[str], needed: int, score: "Callable[[str, str], int]"
) -> list[str]:
    """Return the ``needed`` devices of ``free`` that are nearest to each other and to ``must``.

    ``score`` is the proximity of two devices. A device's position in ``free`` decides between
    equals.
    """
    if needed == len(free):
        return free
    scores = {
        (one, other): score(one, other) for one in free for other in (*must, *free) if one != other
    }
    alone = {one: sum(scores[one, other] for other in must) for one in free}
    if comb(len(free), needed) > _MOST_SETS:
        return _grown(free, needed, scores, alone)

    def worth(devices: tuple[str, ...]) -> int:
        pairs = sum(map(scores.__getitem__, combinations(devices, 2)))
        return pairs + sum(map(alone.__getitem__, devices))

    # Of equals, max takes the first, and combinations come in the list's order.
    return [*max(combinations(free, needed), key=worth)]


def _grown(
    free: list[str], needed: int, scores: dict[tuple[str, str], int], alone: dict[str, int]
) -> list[str]:
    """Return a good set if there are too many to compare: the best of those grown from each device.

    A set grows by the device that is nearest to its current devices.
    """
    found: list[str] = []
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
            found, most = taken, worth
    return [each for each in free if each in found]

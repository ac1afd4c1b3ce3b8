"""Planner: the ordered list of operations that gives a container what vendors grant.

Pure: reads nothing, changes nothing. The hook executes the list, ``gpuhook explain`` prints it,
and in mode ``spec`` the runtime writes it into config.json.
"""

from gpuhook.base.errors import RequestError
from gpuhook.core.plan.operations import AddGroup, AllowDevice, BindDevice, Plan, SetVariable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from typing import Any

    from gpuhook.core.contract import Grant
    from gpuhook.core.inventory.model import DeviceNode
    from gpuhook.core.plan.image import Image
    from gpuhook.core.plan.operations import Operation

_ONE_VENDOR = "Request devices of only one of the two vendors"


def make_plan(
    grants: "Iterable[Grant]",
    image: "Image",
    groups: "Mapping[int, str] | None" = None,
    limits: "Iterable[Operation]" = (),
) -> Plan:
    """Return the operations that give the container what was granted.

    ``groups`` are supplementary groups of its process, ``limits`` set its device memory limits.
    RequestError if two vendors would put different things at one path.
    """
    grants = list(grants)
    by_vendor = [grant.vendor.edits(grant, image) for grant in grants]
    if len(by_vendor) > 1:
        _check_places(by_vendor)
    edits = [op for edits in by_vendor for op in edits]
    last = [op for op in edits if op.last]
    return Plan(
        [
            *(AllowDevice(pair, reason) for pair, reason in rules(grants).items()),
            *limits,
            *(AddGroup(gid, reason) for gid, reason in (groups or {}).items()),
            *(SetVariable(each) for grant in grants for each in grant.vendor.environment(grant)),
            *_nodes(grants),
            *(op for op in edits if not op.last),
            *(op.joined(last[1:]) for op in last[:1]),
        ]
    )


def rules(grants: "Iterable[Grant]") -> dict[tuple[int, int], str]:
    """Return the (major, minor) of each device that the container may open, with the reason."""
    found: dict[tuple[int, int], str] = {}
    for grant in grants:
        for pair, reason in grant.rules().items():
            found.setdefault(pair, reason)
    return found


def _nodes(grants: "Iterable[Grant]") -> "Iterator[Operation]":
    """Yield a mount for each node; a node that several vendors grant is mounted once."""
    taken: dict[str, DeviceNode] = {}
    for grant in grants:
        for node, reason in grant.nodes:
            place = node.inside or node.path
            before = taken.setdefault(place, node)
            if before is node:
                yield BindDevice(grant.inventory.root, node, reason)
            elif before.numbers != node.numbers:
                raise RequestError(
                    f"{before.path} and {node.path} would both be {place} in the container",
                    _ONE_VENDOR,
                )


def _check_places(by_vendor: "list[list[Operation]]") -> None:
    """Raise RequestError if two vendors would put different files at one path."""
    taken: dict[str, tuple[list[Operation], Operation]] = {}
    for edits in by_vendor:
        for op in edits:
            place = op.to_json().get("destination")
            if place is None or op.last:
                continue
            others, before = taken.setdefault(place, (edits, op))
            if others is not edits and _without_reason(before) != _without_reason(op):
                raise RequestError(
                    f"Two vendors would put different files at {place} in the container",
                    _ONE_VENDOR,
                )


def _without_reason(op: "Operation") -> "dict[str, Any]":
    return {**op.to_json(), "reason": ""}

"""Devices that containers get when they ask for those of a test's machines."""

from collections.abc import Iterable
from typing import Any

from paper import spec_with
from steps import resolve

from gpuhook.base.config.model import Config
from gpuhook.core.inventory.model import Inventory
from gpuhook.core.plan import image
from gpuhook.core.plan.operations import Plan
from gpuhook.core.planner import make_plan
from gpuhook.core.resolve import Allocation


def answered(
    found: Inventory,
    *env: str,
    config: Config | None = None,
    beside: Iterable[Inventory] = (),
    **more: Any,
) -> Allocation | None:
    """Return the allocation for an environment.

    ``beside`` are inventories of other vendors, and ``more`` are further fields of the spec.
    """
    every = {each.vendor: each for each in (found, *beside)}
    return resolve(spec_with(*env, **more), config or Config(), inventories=every)


def resolved(found: Inventory, *env: str, **more: Any) -> Allocation:
    answer = answered(found, *env, **more)
    assert answer is not None
    return answer


def planned(found: Inventory, *env: str, **more: Any) -> Plan:
    answer = resolved(found, *env, **more)
    return make_plan(answer.grants, image.unknown(), answer.groups)


def labels(answer: Allocation) -> list[str]:
    """Return the labels of the devices that a container gets."""
    return [device.label for grant in answer.grants for device in grant.devices]


def of_kind(plan: Plan, kind: str) -> list[dict[str, Any]]:
    return [op.to_json() for op in plan.operations if op.kind == kind]


def places(plan: Plan, kind: str = "device") -> list[str]:
    """Return the paths in the container of a plan's device nodes, or of another kind."""
    return [op["destination"] for op in of_kind(plan, kind)]

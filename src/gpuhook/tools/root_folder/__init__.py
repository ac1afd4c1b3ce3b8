"""Requests for root folders without a container engine, and what a folder can't have."""

from gpuhook.base.config.model import Config
from gpuhook.base.errors import MemoryLimitError, RequestError, listed
from gpuhook.base.names import MEMORY_VARIABLE
from gpuhook.base.oci.spec import Spec
from gpuhook.core.contract import check_others
from gpuhook.core.plan.operations import AddGroup, AllowDevice, Operation, Plan
from gpuhook.core.plan.writer import PlanWriter
from gpuhook.core.resolve import Allocation, find_memory_limits

_MODE = "hook"


def settle(config: Config) -> None:
    """Set the settings that apply to a folder, whatever config.toml says.

    There is no config.json and no runtime, and the caller asks itself: gates are for containers.
    """
    config.mode, config.gate = _MODE, False


def check(resolved: Allocation, config: Config, spec: Spec) -> None:
    """Refuse what a folder can't have: RequestError, or MemoryLimitError if a limit is required.

    ``spec`` holds the request.
    """
    if resolved.cdi_devices:
        raise RequestError(
            f"Only an engine that reads CDI documents can give {listed(resolved.cdi_devices)}",
            "Name devices of the kinds that gpuhook info lists",
        )
    kinds = {grant.vendor.names.KIND for grant in resolved.grants if grant.devices}
    if held := kinds.intersection(config.exclusive):
        raise RequestError(
            f"Devices of {listed(sorted(held))} are exclusive, and a folder never ends, as a "
            "container does that has one",
            "Start a container, or take the kind out of exclusive in [gpuhook]",
        )

    for grant in resolved.grants:
        check_others(grant, config)
    if (
        find_memory_limits(spec, config, resolved.vendors, resolved) is not None
    ):  # protects: folder-limits
        raise MemoryLimitError(
            "The memory of these devices is to be limited, and a folder has no cgroup of a "
            "container's, by which that is done",
            f"Start a container, or ask without {MEMORY_VARIABLE} where [gpuhook.limits] sets none",
        )


class StarterWriter(PlanWriter):
    """The operations for the program that starts in the folder: its cgroup and groups."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Operation] = []

    def rule(self, op: AllowDevice) -> None:
        """Skip it, because a folder has no cgroup."""
        self.steps.append(op)

    def group(self, op: AddGroup) -> None:
        """Skip it, because a folder has no process."""
        self.steps.append(op)


def undone(plan: Plan) -> list[Operation]:
    """Return the operations left to the program that starts in the folder."""
    return StarterWriter().write(plan.operations).steps

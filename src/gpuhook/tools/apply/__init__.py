"""Devices for a root folder that no engine makes a container of: the hook's plan, applied there."""

from gpuhook.ground.config.model import Config
from gpuhook.ground.errors import RequestError, listed
from gpuhook.start.plan.operations import AddGroup, AllowDevice, Operation, Plan
from gpuhook.start.resolve import Resolved

MODE = "hook"  # whatever config.toml says: there is no config.json and no runtime


def check(resolved: Resolved, config: Config) -> None:
    """Refuse what a folder can't have: RequestError."""
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


def undone(plan: Plan) -> list[Operation]:
    """Return the steps for whoever starts a program in the folder: its cgroup and groups."""
    return [op for op in plan.operations if isinstance(op, (AddGroup, AllowDevice))]

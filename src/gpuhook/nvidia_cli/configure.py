"""``nvidia-container-cli configure``: put the driver into a container, as the hook does.

The same request, plan and injection as everywhere; only the way to ask is another.
"""

import os

from gpuhook import inject
from gpuhook.config import Config
from gpuhook.container.rootfs import Rootfs
from gpuhook.inventory.model import Inventory
from gpuhook.inventory.selection import Selection
from gpuhook.nvidia_cli.errors import CliError
from gpuhook.oci.spec import State
from gpuhook.plan import image
from gpuhook.plan.operations import BindDevice
from gpuhook.plan.planner import Plan, make_plan
from gpuhook.request.reader import Request
from gpuhook.running import records
from gpuhook.vendors.nvidia import completeness
from gpuhook.vendors.nvidia.requirements import check


class Target:
    """The container: its process (None: we are in its mount namespace already) and root."""

    def __init__(self, pid: int | None, root: str) -> None:
        self.pid = pid
        self.root = root


class Switches:
    """What is left out: the bind mounts of devices, and their rules in the cgroup."""

    def __init__(self, *, devbind: bool, cgroups: bool) -> None:
        self.devbind = devbind
        self.cgroups = cgroups


def configure(
    target: Target,
    request: Request,
    selection: Selection,
    inventory: Inventory,
    config: Config,
    switches: Switches,
) -> None:
    """Inject what was selected; GpuhookError, and nothing left behind, if that fails."""
    completeness.check(request, inventory, selection)
    check(request, inventory, selection)
    pid = target.pid or os.getppid()
    with (
        Rootfs(inventory.root) as host,
        inject.open_container(pid, target.root) as container,
    ):
        plan = make_plan(request, inventory, selection, image.look(container, config))
        record = records.describe(State("", pid, "", None), None, request, selection, plan)
        with records.Written(config.state_dir, container.process, record):
            if switches.cgroups:
                inject.allow_devices(
                    container.process, plan.devices, [], no_cgroups=config.no_cgroups
                )
            if not switches.devbind:
                plan = Plan([step for step in plan.operations if not isinstance(step, BindDevice)])
            inject.inject(plan, host, container, enter=target.pid is not None)


def checked_root(path: str) -> str:
    """Return the container's root; CliError if it can't be one."""
    if not path.startswith("/") or not path.strip("/"):
        raise CliError("input error", "invalid rootfs directory")
    return path

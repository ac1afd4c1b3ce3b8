"""``nvidia-container-cli configure``: put the driver into a container, as the hook does.

The same request, plan and injection as everywhere; only the way to ask is another.
"""

import os

from gpuhook import completeness, image, inject, records
from gpuhook.config import Config
from gpuhook.inventory import Inventory
from gpuhook.nvidia_cli.errors import CliError
from gpuhook.oci import State
from gpuhook.operations import BindDevice
from gpuhook.plan import Plan, make_plan
from gpuhook.request import Request
from gpuhook.requirements import check
from gpuhook.rootfs import Rootfs
from gpuhook.selection import Selection


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

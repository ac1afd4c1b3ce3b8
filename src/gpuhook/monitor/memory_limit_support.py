"""Check whether the host supports memory limits on its devices."""

import os

from gpuhook.base.cgroup import dmem
from gpuhook.base.config.model import Config
from gpuhook.base.errors import GpuhookError, MemoryLimitError
from gpuhook.core.contract import Grant, Vendor
from gpuhook.core.inventory.model import Device, Inventory
from gpuhook.core.request.reader import Request


def what_it_takes(
    vendor: Vendor,
    inventory: Inventory,
    config: Config,
    devices: tuple[Device, ...] | None = None,
) -> GpuhookError | None:
    """Return why memory limits can't be set for a vendor's devices, None if they can.

    ``devices`` selects some devices, None all of them.
    """
    if not os.path.exists(f"{dmem.TREE}/cgroup.controllers"):
        return MemoryLimitError(
            f"Memory limits need cgroup v2 at {dmem.TREE}",
            "Boot with only cgroup v2 (systemd.unified_cgroup_hierarchy=1)",
        )
    every = Grant(
        vendor,
        Request(vendor.names.NAME),
        inventory,
        inventory.devices if devices is None else devices,
    )
    try:
        vendor.memory_limiter(every, config)
    except GpuhookError as error:
        return error
    return None

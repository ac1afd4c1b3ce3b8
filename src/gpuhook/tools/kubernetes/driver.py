"""The driver folder that answers by the strategy ``mounts`` name, kept in line with the machine.

In a child, as CDI documents are: it may have to copy some hundred megabytes.
"""

import os
from collections.abc import Callable, Container, Iterable

from gpuhook.ground.config.model import Config
from gpuhook.ground.container import kernel
from gpuhook.ground.errors import GpuhookError
from gpuhook.tools.kubernetes.machine import Found
from gpuhook.tools.kubernetes.settings import Settings

_PATIENCE = 120  # seconds


def keep(
    settings: Settings,
    config: Config,
    found: Iterable[Found],
    failing: Container[str],
    tell: Callable[[str], None],
) -> bool:
    """Have the folder hold the files of the driver that is there; return whether that went well.

    It stays as it is where the driver is gone, or is one of the ``failing`` ones. ``tell`` gets a
    sentence for each change, and for what is wrong.
    """
    inventories = [each for vendor, each in found if vendor.names.NAME not in failing]
    child = os.fork()
    if child == 0:
        status = 1
        try:
            kernel.die_with_parent()
            kernel.end_after(_PATIENCE)
            from gpuhook.tools.driver_folder.keep import keep as keep_one  # noqa: PLC0415 - here alone

            folder = settings.driver_folder
            for inventory in inventories:
                if keep_one(config, inventory, folder):
                    tell(f"{folder} has the files of driver {inventory.version}")
            status = 0
        except GpuhookError as error:
            tell(f"The driver folder: {error}")
        finally:
            os._exit(status)
    return kernel.reap(child, _PATIENCE + 1.0) == 0

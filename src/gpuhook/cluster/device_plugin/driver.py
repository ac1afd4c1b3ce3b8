"""The driver folder that responses of the strategy ``mounts`` use, updated to match the host.

A child does the work, as for CDI specs: it may have to copy some hundred megabytes.
"""

from collections.abc import Callable, Container, Iterable

from gpuhook.base.config.model import Config
from gpuhook.cluster.device_plugin.settings import Settings
from gpuhook.monitor.host import child
from gpuhook.monitor.machine import Found

_PATIENCE = 120  # seconds


def keep(
    settings: Settings,
    config: Config,
    found: Iterable[Found],
    failing: Container[str],
    tell: Callable[[str], None],
) -> bool:
    """Fill the folder with the files of the installed driver; return whether that succeeded.

    The folder stays unchanged if the driver is gone, or is one of the ``failing`` ones. ``tell``
    gets a sentence for each change and each problem.
    """
    present = [each for each in found if each[0].names.NAME not in failing]

    def work() -> bool:
        from gpuhook.tools.driver_folder.keep import keep as keep_one  # noqa: PLC0415 - only here

        folder = settings.driver_folder
        for vendor, inventory in present:
            if keep_one(config, vendor.names, inventory, folder):
                tell(f"{folder} has the files of driver {inventory.version}")
        return True

    return child.do(work, _PATIENCE, tell, "The driver folder")

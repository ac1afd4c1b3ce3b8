"""NVIDIA's platforms without its driver for Linux: WSL2, and Tegra's own GPU.

There is no NVML that says which nodes and files belong to a GPU: all come at fixed places, or
from lists. Pure: looks at nothing.
"""

from gpuhook.errors import RequestError, UnknownDeviceError
from gpuhook.vendors.nvidia.variables import CSV_MOUNTS, IMEX_CHANNELS, MIG_CONFIG, MIG_MONITOR
from gpuhook.vendors.seam import existing

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpuhook.inventory.model import Node
    from gpuhook.vendors.seam import Grant

WSL, TEGRA = "wsl", "tegra"
TITLES = {WSL: "WSL2", TEGRA: "Tegra"}


def check(grant: "Grant") -> None:
    """Raise RequestError for what there is on no such platform: MIG, IMEX channels."""
    title, options = TITLES[grant.inventory.platform], grant.request.options
    for name, value in ((MIG_CONFIG, options.mig_config), (MIG_MONITOR, options.mig_monitor)):
        if value is not None:
            raise RequestError(f"{name} is set, and {title} has no MIG", f"Unset {name}")
    if options.imex_channels:
        raise UnknownDeviceError(f"{title} has no IMEX channels", f"Unset {IMEX_CHANNELS}")


def warnings(grant: "Grant") -> list[str]:
    """Return that a node is for all GPUs where a container gets one of several."""
    inventory = grant.inventory
    if inventory.platform == WSL and 0 < len(grant.devices) < len(inventory.devices):
        return [
            "WSL2 has one node for all GPUs: the container can use those it didn't ask for, too"
        ]
    return []


def nodes(grant: "Grant") -> "list[tuple[Node, str]]":
    """Return the nodes of the devices, and for those who ask for all lists the others'."""
    wanted = {path: f"GPU {device.label}" for device in grant.devices for path in device.nodes}
    if grant.devices and CSV_MOUNTS in grant.request.options.features:
        for node in grant.inventory.nodes:
            wanted.setdefault(node.path, "every list is asked for")
    return existing(wanted, grant.inventory.nodes)

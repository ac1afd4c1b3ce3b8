"""Checks of [gpuhook.mps], and the memory sizes in it. Imported only if the table is used."""

from gpuhook.base.errors import shown
from gpuhook.base.sizes import parse_size

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from gpuhook.base.config.model import Config

VERSIONS = ("auto", "2", "3")
MOST_CLIENTS = 48  # per GPU: NVIDIA's MPS guide, for Volta and newer
_EXCLUSIVE = "nvidia.com/gpu"
_SHORT = ("K", "M", "G", "T")


def check(config: "Config", wrong: "Callable[[str, str], None]") -> None:
    """Report invalid values, each with its key."""
    devices = [word.strip() for word in config.mps_devices.split(",")]
    if config.mps_devices and not all(devices):
        problem = f'must be "all" or names with commas between them, not {shown(",".join(devices))}'
        wrong("gpuhook.mps.devices", problem)
    if not 0 <= config.mps_percentage <= 100:
        problem = f"must be from 1 to 100, or 0 for no limit, not {config.mps_percentage}"
        wrong("gpuhook.mps.active-thread-percentage", problem)
    if config.mps_memory and bytes_of(config.mps_memory, 1 << 40) is None:
        problem = f"must be a size such as 8GiB or 50%, not {shown(config.mps_memory)}"
        wrong("gpuhook.mps.device-memory", problem)
    if not 1 <= config.mps_clients <= MOST_CLIENTS:  # protects: mps-clients
        problem = f"must be from 1 to {MOST_CLIENTS}, the maximum of MPS, not "
        wrong("gpuhook.mps.clients", f"{problem}{config.mps_clients}")
    if config.mps_version not in VERSIONS:
        problem = f"must be one of {', '.join(VERSIONS)}, not {shown(config.mps_version)}"
        wrong("gpuhook.mps.version", problem)
    if config.mps_devices and _EXCLUSIVE in config.exclusive:  # protects: mps-exclusive
        problem = f"can't be used with {_EXCLUSIVE} in gpuhook.exclusive: MPS shares GPUs, and "
        wrong("gpuhook.mps.devices", f"{problem}that setting reserves them for one container")


def bytes_of(text: str, total: int) -> int | None:
    """Return how many bytes a size means, None if it is invalid or 0.

    ``total`` is the device's memory in bytes, for a size such as 50%. 8G and 8GiB are the same,
    because MPS knows only the first.
    """
    size = parse_size(f"{text}iB" if text[-1:] in _SHORT else text)
    return size.of(total) if size else None

"""Contract of device memory limiters, and the limiter that uses the kernel's dmem controller."""

from gpuhook.base.cgroup import dmem
from gpuhook.base.errors import MemoryLimitError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from gpuhook.core.inventory.model import Device, Inventory

    # Device id -> bytes.
    Bytes = Mapping[str, int]
    # Device id -> bytes in use, and the limit.
    Use = dict[str, tuple[int, int | None]]


class MemoryLimiter:
    """Memory limits for one container, used once; a plain class, because no start imports abc."""

    memory: "Bytes"  # the memory of each device that can be limited
    is_slow = False  # its means take long to prepare, unless they are kept ready

    def means(self, device: "Device") -> str:
        """Name the mechanism that sets a device's limit, in a word or two."""
        raise NotImplementedError

    def begin(self) -> None:
        """Do slow preparations in advance; ``set`` reports their errors."""

    def set(self, tree: str, folder: str, wanted: "Bytes") -> None:
        """Limit device memory for a cgroup (v2, mounted at ``tree``); MemoryLimitError."""
        raise NotImplementedError

    def used(self, tree: str, folders: "Iterable[str]") -> "dict[str, Use]":
        """Return, by cgroup, the use and limit (or None) of each device; MemoryLimitError."""
        raise NotImplementedError

    def close(self) -> None:
        """Release the resources of ``begin``."""


class DmemLimiter(MemoryLimiter):
    """Limits set by the kernel, for drivers that register their memory with it.

    A device may have several regions: each gets its share of the limit.
    """

    def __init__(self, devices: "Iterable[Device]", inventory: "Inventory", noun: str) -> None:
        """Find the devices' regions; MemoryLimitError if a device has none of its own.

        ``noun`` is the word for a device in messages.
        """
        every = dmem.regions(dmem.TREE)
        self._regions: dict[str, dict[str, int]] = {}
        shared = [device.bus_id for device in inventory.devices]
        for device in devices:
            bus_id = device.bus_id
            if device.parent or not bus_id or shared.count(bus_id) > 1:
                raise MemoryLimitError(
                    f"The memory of {noun} {device.label} can't be limited separately: it is a "
                    "part of a card, and the kernel counts memory by card",
                    "Start the container without a limit: a part has only its own memory anyway",
                )
            found = {name: size for name, size in every.items() if bus_id in name.split("/")}
            if not found:
                raise MemoryLimitError(
                    f"dmem.capacity lists no memory of {noun} {device.label} ({bus_id})",
                    "Use a driver that registers its memory there, or start without a limit",
                )
            self._regions[device.id] = found
        self.memory = {name: sum(found.values()) for name, found in self._regions.items()}

    def means(self, device: "Device") -> str:
        """Name the regions."""
        return f"dmem.max of {', '.join(self._regions[device.id])}"

    def set(self, tree: str, folder: str, wanted: "Bytes") -> None:
        """Write dmem.max."""
        parts = {}
        for name, number in wanted.items():
            whole = self.memory[name]
            for region, size in self._regions[name].items():
                parts[region] = number * size // whole
        dmem.limit(tree, folder, parts)

    def used(self, tree: str, folders: "Iterable[str]") -> "dict[str, Use]":  # noqa: ARG002
        """Read dmem.current and dmem.max."""
        return {folder: dmem.used(folder, self._regions) for folder in folders}

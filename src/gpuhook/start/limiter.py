"""What sets limits of devices' memory: the contract, and the kernel's dmem controller by it."""

from gpuhook.ground.cgroup import dmem
from gpuhook.ground.errors import LimitError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from gpuhook.start.inventory.model import Device, Inventory

    # A device's id -> bytes.
    Bytes = Mapping[str, int]
    # A device's id -> bytes that are used, and the limit.
    Use = dict[str, tuple[int, int | None]]


class Limiter:
    """Sets limits for one container, once."""

    memory: "Bytes"  # what each device has that may be limited
    is_slow = False  # its means take long to be ready, unless they are kept so

    def means(self, device: "Device") -> str:
        """Say by what a device's limit is set, in a word or two."""
        raise NotImplementedError

    def begin(self) -> None:
        """Do beforehand what takes time; what fails is said by ``set``."""

    def set(self, tree: str, folder: str, wanted: "Bytes") -> None:
        """Limit devices' memory for a cgroup (v2, mounted at ``tree``); LimitError."""
        raise NotImplementedError

    def used(self, tree: str, folders: "Iterable[str]") -> "dict[str, Use]":
        """Return by cgroup what it uses of each device, and its limit (None: none); LimitError."""
        raise NotImplementedError

    def close(self) -> None:
        """Let go of what ``begin`` made."""


class Dmem(Limiter):
    """Limits by the kernel, for drivers that register their memory there.

    A device may have several regions: each gets its part, and together they are the limit.
    """

    def __init__(self, devices: "Iterable[Device]", inventory: "Inventory", noun: str) -> None:
        """Look up the devices' regions; LimitError where one has none of its own.

        ``noun`` is what a person calls a device.
        """
        every = dmem.regions(dmem.TREE)
        self._regions: dict[str, dict[str, int]] = {}
        shared = [device.bus_id for device in inventory.devices]
        for device in devices:
            bus_id = device.bus_id
            if device.parent or not bus_id or shared.count(bus_id) > 1:
                raise LimitError(
                    f"The memory of {noun} {device.label} can't be limited by itself: it is a part "
                    "of a card, and the kernel counts by the card",
                    "Start the container without a limit: a part has no more than its own",
                )
            found = {name: size for name, size in every.items() if bus_id in name.split("/")}
            if not found:
                raise LimitError(
                    f"dmem.capacity has no memory of {noun} {device.label} ({bus_id})",
                    "Use a driver that counts its memory there, or start without a limit",
                )
            self._regions[device.id] = found
        self.memory = {name: sum(found.values()) for name, found in self._regions.items()}

    def means(self, device: "Device") -> str:
        """Say which regions."""
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

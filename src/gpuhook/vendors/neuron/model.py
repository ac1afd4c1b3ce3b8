"""What one host has of AWS Neuron's, as plain data, and where the driver shows it."""

from gpuhook.start.inventory import model

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Self

CLASS = "/sys/class/neuron_device"  # the driver's: a folder for each device, and other things


class Inventory(model.Inventory):
    """What one host has of Neuron's; ``cores`` are those of each device, 0 where unknown."""

    __slots__ = ("cores",)

    def __init__(self, *facts: "Any", cores: tuple[int, ...] = (), **more: "Any") -> None:
        super().__init__(*facts, **more)
        self.cores = cores

    @classmethod
    def from_json(cls, data: "dict[str, Any]") -> "Self":
        """Rebuild from what ``to_json`` returned; KeyError or TypeError if it is not that."""
        found = super().from_json(data)
        found.cores = tuple(data["cores"])
        return found

    def table(self) -> "tuple[tuple[str, ...], list[tuple[object, ...]]]":
        """Return the devices as a table for a person; no file says where they are on the bus."""
        rows: list[tuple[object, ...]] = [
            (device.label, device.model, cores or "-", device.id, device.state or "-")
            for device, cores in zip(self.devices, self.cores, strict=True)
        ]
        return ("INDEX", "NAME", "CORES", "SERIAL", "STATE"), rows

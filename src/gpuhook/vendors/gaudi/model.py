"""Inventory of Intel Gaudi devices, and the driver's folder."""

from gpuhook.core.inventory import model

# The driver's folder, with a folder for each of its devices, by PCI address. Nodes in /dev/accel
# may belong to other drivers.
DRIVER = "/sys/bus/pci/drivers/habanalabs"


class Inventory(model.Inventory):
    """Inventory of Gaudi devices; ``networked`` are the ids of devices with network ports."""

    networked: tuple[str, ...] = ()

    def table(self) -> "tuple[tuple[str, ...], list[tuple[object, ...]]]":
        """Return the devices as a table for display, with their seats."""
        rows: list[tuple[object, ...]] = [
            (device.label, ",".join(seats(device)) or "-", device.model, device.id,
             device.state or "-")
            for device in self.devices
        ]  # fmt: skip
        return ("INDEX", "MODULE", "NAME", "BUS ID", "STATE"), rows


def seats(device: model.Device) -> tuple[str, ...]:
    """Return the number of a device's seat, nothing if unknown."""
    return device.names.get("module", ())

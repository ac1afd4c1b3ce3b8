"""What one host has of Intel Gaudi's, as plain data, and where the driver shows it."""

from gpuhook.start.inventory import model

# The driver's: a folder for each of its devices, by PCI address. Nodes of /dev/accel may be
# other drivers', too.
DRIVER = "/sys/bus/pci/drivers/habanalabs"


class Inventory(model.Inventory):
    """What one host has of Gaudi's; ``networked`` are the ids of devices with network ports."""

    networked: tuple[str, ...] = ()

    def table(self) -> "tuple[tuple[str, ...], list[tuple[object, ...]]]":
        """Return the devices as a table for a person, with their seats."""
        rows: list[tuple[object, ...]] = [
            (device.label, ",".join(seats(device)) or "-", device.model, device.id,
             device.state or "-")
            for device in self.devices
        ]  # fmt: skip
        return ("INDEX", "MODULE", "NAME", "BUS ID", "STATE"), rows


def seats(device: model.Device) -> tuple[str, ...]:
    """Return the number of a device's seat, nothing where it isn't known."""
    return device.names.get("module", ())

"""What one host has of AWS Neuron's, as plain data, and where the driver shows it."""

from gpuhook.start.inventory import model

CLASS = "/sys/class/neuron_device"  # the driver's: a folder for each device, and other things
SERIAL = "info/serial_number"  # in a device's


class Inventory(model.Inventory):
    """What one host has of Neuron's; ``cores`` are those of each device, 0 where unknown."""

    cores: tuple[int, ...] = ()

    def table(self) -> "tuple[tuple[str, ...], list[tuple[object, ...]]]":
        """Return the devices as a table for a person; no file says where they are on the bus."""
        rows: list[tuple[object, ...]] = [
            (device.label, device.model, cores or "-", device.id, device.state or "-")
            for device, cores in zip(self.devices, self.cores, strict=True)
        ]
        return ("INDEX", "NAME", "CORES", "SERIAL", "STATE"), rows

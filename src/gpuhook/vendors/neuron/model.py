"""Inventory of AWS Neuron devices, and the driver's folders."""

from gpuhook.core.inventory import model

CLASS = "/sys/class/neuron_device"  # of the driver: a folder for each device, and other things
SERIAL = "info/serial_number"  # in a device's folder


class Inventory(model.Inventory):
    """Inventory of Neuron devices; ``cores`` are those of each device, 0 if unknown."""

    cores: tuple[int, ...] = ()

    def table(self) -> "tuple[tuple[str, ...], list[tuple[object, ...]]]":
        """Return the devices as a table for display; no file has their bus addresses."""
        rows: list[tuple[object, ...]] = [
            (device.label, device.model, cores or "-", device.id, device.state or "-")
            for device, cores in zip(self.devices, self.cores, strict=True)
        ]
        return ("INDEX", "NAME", "CORES", "SERIAL", "STATE"), rows

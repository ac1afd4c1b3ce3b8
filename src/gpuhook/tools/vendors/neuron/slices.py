"""Neuron devices under the names that AWS' own DRA driver publishes (neuron.aws.com).

Of its attributes those that this machine itself can say: no type of instance, and no place in a
network.
"""

from typing import Any

from gpuhook.ground.container.rootfs import Rootfs
from gpuhook.start.inventory.model import Device
from gpuhook.tools.vendors.slices import Slices, Value


class NeuronSlices(Slices):
    """AWS' accelerators."""

    driver = "neuron.aws.com"

    def attributes(self, device: Device, inventory: Any, root: Rootfs) -> dict[str, Value]:
        number = device.label
        found: dict[str, Value] = {
            "deviceId": int(number) if number.isdecimal() else 0,
            "model": device.model,
            "neuronDriverVersion": inventory.version,  # a text there: it has four numbers
        }
        return {name: value for name, value in found.items() if value != ""}

    def capacity(self, device: Device, inventory: Any, root: Rootfs) -> dict[str, int]:
        pairs = zip(inventory.devices, inventory.cores, strict=True)
        cores = next((count for each, count in pairs if each.id == device.id), 0)
        return {"neuroncores": cores} if cores else {}


SLICES = NeuronSlices

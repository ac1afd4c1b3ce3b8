"""Neuron devices: nearness, and the attributes of AWS's own DRA driver (neuron.aws.com).

Only attributes that this host itself can report are published: no instance type, and no network
location.
"""

from typing import Any

from gpuhook.base.container.rootfs import Rootfs
from gpuhook.cluster.vendors.cluster import VendorCluster
from gpuhook.cluster.vendors.slices import Slices, Value
from gpuhook.core.inventory.model import Device


class NeuronCluster(VendorCluster):
    """Devices of which a container can have only adjacent ones (``vendor.Neuron.check``)."""

    pci_classes = ()  # node-feature-discovery doesn't label their class

    def links(self, inventory: Any) -> dict[str, dict[str, int]]:
        by_number = {int(device.label): device.id for device in inventory.devices}
        found: dict[str, dict[str, int]] = {each: {} for each in by_number.values()}
        for number, identity in by_number.items():
            for other in (number - 1, number + 1):
                if other in by_number:
                    found[identity][by_number[other]] = 1
        return found


CLUSTER = NeuronCluster


class NeuronSlices(Slices):
    """AWS accelerators."""

    driver = "neuron.aws.com"

    def attributes(self, device: Device, inventory: Any, root: Rootfs) -> dict[str, Value]:
        number = device.label
        found: dict[str, Value] = {
            "deviceId": int(number) if number.isdecimal() else 0,
            "model": device.model,
            "neuronDriverVersion": inventory.version,  # a string there: it has four numbers
        }
        return {name: value for name, value in found.items() if value != ""}

    def capacity(self, device: Device, inventory: Any, root: Rootfs) -> dict[str, int]:
        pairs = zip(inventory.devices, inventory.cores, strict=True)
        cores = next((count for each, count in pairs if each.id == device.id), 0)
        return {"neuroncores": cores} if cores else {}


SLICES = NeuronSlices

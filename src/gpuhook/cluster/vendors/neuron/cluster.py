"""Neuron devices for a cluster: those with adjacent numbers are near each other."""

from typing import Any

from gpuhook.cluster.vendors.cluster import Cluster


class NeuronCluster(Cluster):
    """Devices of which a container can have only adjacent ones (``vendor.Neuron.check``)."""

    def links(self, inventory: Any) -> dict[str, dict[str, int]]:
        by_number = {int(device.label): device.id for device in inventory.devices}
        found: dict[str, dict[str, int]] = {each: {} for each in by_number.values()}
        for number, identity in by_number.items():
            for other in (number - 1, number + 1):
                if other in by_number:
                    found[identity][by_number[other]] = 1
        return found


CLUSTER = NeuronCluster

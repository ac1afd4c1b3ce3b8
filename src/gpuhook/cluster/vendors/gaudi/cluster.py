"""Gaudis for a cluster, by address, with the module ids that Habana's libraries look for."""

from gpuhook.cluster.vendors.cluster import Cluster
from gpuhook.core.inventory.model import Device
from gpuhook.vendors.gaudi.model import seats
from gpuhook.vendors.gaudi.vendor import MODULES


class GaudiCluster(Cluster):
    """Whole devices."""

    nothing = "none"  # Habana's own hook reads "void" as all

    def variables(self, device: Device) -> dict[str, str]:
        numbers = seats(device)
        return {MODULES: numbers[0]} if numbers else {}


CLUSTER = GaudiCluster

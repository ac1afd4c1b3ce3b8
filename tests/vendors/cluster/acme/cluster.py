"""ACME's NPUs in a cluster: with their parts, unless only whole ones are selected."""

from typing import Any

from gpuhook.base.container.rootfs import Rootfs
from gpuhook.cluster.vendors.cluster import Offers, VendorCluster


class AcmeCluster(VendorCluster):
    """NPUs, and the parts of those that are split."""

    def offers(self, inventory: Any, root: Rootfs) -> tuple[Offers, list[str]]:
        found, warnings = super().offers(inventory, root)
        if self.chosen and self.chosen.whole:
            found = {name: [one for one in each if not one.parent] for name, each in found.items()}
        return found, warnings


CLUSTER = AcmeCluster

"""The vendor AMD: only nodes, because AMD's libraries are in the image."""

from gpuhook.core.contract import Vendor
from gpuhook.core.inventory.fingerprint import names as listed
from gpuhook.core.inventory.fingerprint import status, text
from gpuhook.vendors.amd import names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from gpuhook.base.config.model import Config

# Below a driver root.
MODULE = "/sys/module/amdgpu"
GPUS = f"{MODULE}/drivers/pci:amdgpu"  # a link to each PCI device of the driver
PLATFORM = "/sys/devices/platform"
# Further partitions: named amdgpu_xcp_1 by AMD's own driver, amdgpu_xcp.1 by Linux.
PARTITION = "amdgpu_xcp"
TOPOLOGY = "/sys/class/kfd/kfd/topology"
CONTROL = "/dev/kfd"
NODES = "/dev/dri"


class Amd(Vendor):
    """AMD GPUs and partitions, from the kernel's interfaces."""

    names = names
    in_dmem = True

    def driver_markers(self) -> "Sequence[str]":
        return (MODULE,)

    def cache_key(self, config: "Config") -> "list[Any]":
        root = self.root(config).rstrip("/")
        return [
            text(f"{root}{TOPOLOGY}/generation_id"),
            listed(f"{root}{TOPOLOGY}/nodes"),
            listed(f"{root}{GPUS}"),
            [name for name in listed(f"{root}{PLATFORM}") if name.startswith(PARTITION)],
            status(f"{root}{NODES}"),  # loading the driver again creates its nodes again
        ]


VENDOR = Amd()

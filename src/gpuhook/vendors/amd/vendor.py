"""The vendor AMD: only nodes, because AMD's libraries are in the image."""

from gpuhook.core.contract import Vendor
from gpuhook.core.inventory.fingerprint import names as listed
from gpuhook.core.inventory.fingerprint import status, text
from gpuhook.vendors.amd import names
from gpuhook.vendors.amd.paths import GPUS, MODULE, NODES, PARTITION, PLATFORM, TOPOLOGY

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from gpuhook.base.config.model import Config


class Amd(Vendor):
    """AMD GPUs and partitions, from the kernel's interfaces."""

    names = names
    in_dmem = True

    def traces(self) -> "Sequence[str]":
        return (MODULE,)

    def surroundings(self, config: "Config") -> "list[Any]":
        root = self.root(config).rstrip("/")
        return [
            text(f"{root}{TOPOLOGY}/generation_id"),
            listed(f"{root}{TOPOLOGY}/nodes"),
            listed(f"{root}{GPUS}"),
            [name for name in listed(f"{root}{PLATFORM}") if name.startswith(PARTITION)],
            status(f"{root}{NODES}"),  # loading the driver again creates its nodes again
        ]


VENDOR = Amd()

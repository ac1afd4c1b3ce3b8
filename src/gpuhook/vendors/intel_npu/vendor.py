"""The vendor Intel for NPUs: only nodes."""

from gpuhook.core.contract import Vendor
from gpuhook.core.inventory import fingerprint
from gpuhook.vendors.intel_npu import names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from gpuhook.base.config.model import Config

_PCI_DRIVER = "/sys/bus/pci/drivers/intel_vpu"


class IntelNpu(Vendor):
    """Intel NPUs, from the kernel's interfaces."""

    names = names

    def driver_markers(self) -> "Sequence[str]":
        return (_PCI_DRIVER,)

    def cache_key(self, config: "Config") -> "list[Any]":
        root = self.root(config).rstrip("/")
        bound = [name for name in fingerprint.names(root + _PCI_DRIVER) if ":" in name]
        return [
            [[name, fingerprint.names(f"{root}{_PCI_DRIVER}/{name}/accel")] for name in bound],
            fingerprint.status(f"{root}/dev/accel"),
        ]


VENDOR = IntelNpu()

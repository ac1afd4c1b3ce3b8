"""The vendor Intel for GPUs: nodes, and the links that programs use to find them."""

from gpuhook.core.contract import Vendor
from gpuhook.core.inventory import fingerprint
from gpuhook.vendors.intel_gpu import names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from gpuhook.base.config.model import Config
    from gpuhook.core.contract import Grant
    from gpuhook.core.plan.image import Image
    from gpuhook.core.plan.operations import Operation

_PCI_DRIVERS = ("/sys/bus/pci/drivers/i915", "/sys/bus/pci/drivers/xe")


class IntelGpu(Vendor):
    """Intel GPUs and virtual functions, from the kernel's interfaces."""

    names = names
    in_dmem = True

    def driver_markers(self) -> "Sequence[str]":
        return _PCI_DRIVERS

    def cache_key(self, config: "Config") -> "list[Any]":
        root = self.root(config).rstrip("/")
        folders = [root + folder for folder in _PCI_DRIVERS]
        listed = [f"{folder}/{name}" for folder in folders for name in fingerprint.names(folder)]
        bound = [path for path in listed if ":" in path]
        return [
            [[folder, fingerprint.names(f"{folder}/drm")] for folder in bound],
            [fingerprint.status(folder) is not None for folder in folders],
            fingerprint.status(f"{root}/dev/dri"),
        ]

    def edits(self, grant: "Grant", image: "Image") -> "list[Operation]":  # noqa: ARG002
        from gpuhook.core.plan.operations import Symlink  # noqa: PLC0415 - the hook's, not the runtime's

        given = {node.path for node, _ in grant.nodes}
        found: list[Operation] = []
        for device in grant.devices:
            for path in device.nodes:
                name = path.rpartition("/")[2]
                kind = "render" if name.startswith("render") else "card"
                link = f"/dev/dri/by-path/pci-{device.bus_id}-{kind}"
                if path in given:
                    reason = f"GPU {device.label} by its PCI address"
                    found.append(Symlink(link, f"../{name}", replace=False, reason=reason))
        return found


VENDOR = IntelGpu()

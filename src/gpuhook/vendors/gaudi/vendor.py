"""The vendor Intel Gaudi: operational devices, and their seats in a variable.

Habana's libraries use the devices whose seats (module ids) are in HABANA_VISIBLE_MODULES, so that
variable is set to the seats of a container's devices. Habana's hook moves the cards' own network
ports into a container; gpuhook doesn't.
"""

from gpuhook.base.oci.process import EnvironmentSetting
from gpuhook.core.contract import Vendor
from gpuhook.core.inventory import fingerprint, model
from gpuhook.vendors.gaudi import names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from gpuhook.base.config.model import Config
    from gpuhook.core.contract import Grant

# The driver's folder, with a folder for each of its devices, by PCI address. Nodes in /dev/accel
# may belong to other drivers.
DRIVER = "/sys/bus/pci/drivers/habanalabs"
MODULES = "HABANA_VISIBLE_MODULES"


class GaudiInventory(model.Inventory):
    """Inventory of Gaudi devices; ``networked`` are the ids of devices with network ports."""

    networked: tuple[str, ...] = ()

    def table(self) -> "tuple[tuple[str, ...], list[tuple[object, ...]]]":
        """Return the devices as a table for display, with their seats."""
        rows: list[tuple[object, ...]] = [
            (device.label, ",".join(seats(device)) or "-", device.model, device.id,
             device.state or "-")
            for device in self.devices
        ]  # fmt: skip
        return ("INDEX", "MODULE", "NAME", "BUS ID", "STATE"), rows


def seats(device: model.Device) -> tuple[str, ...]:
    """Return the number of a device's seat, nothing if unknown."""
    return device.names.get("module", ())


class Gaudi(Vendor):
    """Gaudi devices, from the PCI driver that they are bound to."""

    names = names
    inventory = GaudiInventory

    def driver_markers(self) -> "Sequence[str]":
        return (DRIVER,)

    def cache_key(self, config: "Config") -> "list[Any]":
        folder = self.root(config).rstrip("/") + DRIVER
        found = []
        for address in fingerprint.names(folder):
            if ":" in address:
                place = f"{folder}/{address}"
                inside = (fingerprint.names(f"{place}/{name}") for name in ("accel", "net"))
                status = fingerprint.text(f"{place}/status")
                verbs = fingerprint.names(f"{place}/infiniband_verbs")
                found.append([address, status, *inside, verbs])
        return found

    def warnings(self, grant: "Grant") -> list[str]:
        networked = grant.inventory.networked
        labels = [device.label for device in grant.devices if device.id in networked]
        if not labels:
            return []
        which = ", ".join(labels)
        hook = "Habana's own hook does that"
        return [f"The network ports of Gaudi {which} aren't moved into the container: {hook}"]

    def environment(self, grant: "Grant") -> list[EnvironmentSetting]:
        numbers = [number for device in grant.devices for number in seats(device)[:1]]
        if not numbers or len(numbers) < len(grant.devices):
            return []
        text = ",".join(sorted(numbers, key=int))
        return [
            EnvironmentSetting(MODULES, text, "Habana's libraries use the devices in these seats")
        ]


VENDOR = Gaudi()

"""What a cluster's device plugin asks of a vendor, beside what a container's start does.

A vendor whose devices are handed out one by one, under the name of their CDI kind, needs nothing
here. Others have a module ``cluster`` in their folder, with a subclass of this name.

``root`` is the driver root, to read small files below it.
"""

from collections.abc import Iterable
from types import ModuleType
from typing import Any

from gpuhook.ground.container.rootfs import Rootfs
from gpuhook.start.inventory.model import Device
from gpuhook.tools.vendors.parts import part

Offers = dict[str, list[Device]]


class Cluster:
    """A vendor's answers; these are for devices that are nodes alone."""

    # Where programs in a container look for the driver's files if no runtime puts them in; "" for
    # drivers whose files are in the image, or that have no such place.
    driver_folder = ""
    # The word in the vendor's variable by which every program that reads it gives nothing.
    nothing = "void"

    def __init__(self, names: ModuleType) -> None:
        self.names = names

    def id(self, device: Device) -> str:
        """Return what the cluster tells a device by: the same after a reboot, where there is such.

        At most 63 characters.
        """
        return device.id

    def resource(self, device: Device, root: Rootfs) -> str:  # noqa: ARG002
        """Return the name by which a pod asks for such a device."""
        return str(self.names.KIND)

    def offers(self, inventory: Any, root: Rootfs, mig_strategy: str) -> tuple[Offers, list[str]]:
        """Return the devices to hand out, by resource, and what a person should know of them.

        Those that can't be used now are among them, and none whose parts can be asked for.
        ``mig_strategy`` is none, single or mixed. RequestError where the devices don't fit it.
        """
        del mig_strategy
        whole = {device.parent for device in inventory.devices}
        found: Offers = {}
        for device in inventory.devices:
            if device.id not in whole:
                found.setdefault(self.resource(device, root), []).append(device)
        return found, []

    def lost(self, inventory: Any, root: Rootfs) -> list[Device]:  # noqa: ARG002
        """Return the devices that are there and can't be reached any more, as far as known."""
        state = "it can't be reached any more"
        return [Device(f"lost-{each}", str(each), {}, state=state) for each in inventory.lost]

    def variables(self, device: Device) -> dict[str, str]:  # noqa: ARG002
        """Return the variables that a device's programs need where gpu-py doesn't set them.

        Of several devices the values are joined by commas.
        """
        return {}

    def links(self, inventory: Any) -> dict[str, dict[str, int]]:  # noqa: ARG002
        """Return how near devices are by what the inventory says, as in ``Resource.links``."""
        return {}

    def enable(
        self,
        inventory: Any,  # noqa: ARG002
        options: Any,  # noqa: ARG002
        features: Iterable[str],  # noqa: ARG002
        channels: Iterable[int],  # noqa: ARG002
    ) -> tuple[dict[str, str], tuple[str, ...]]:
        """Put into a request's options what every container gets beside devices, where it can.

        Return the variables and the CDI devices that ask for it. ``features`` are gds, mofed and
        gdrcopy; ``channels`` are those of IMEX.
        """
        return {}, ()


def of(names: ModuleType) -> Cluster:
    """Return the answers of the vendor with these names."""
    module = part(names, "cluster")
    found: Cluster = (module.CLUSTER if module else Cluster)(names)
    return found

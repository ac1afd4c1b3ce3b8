"""The interface of vendors for a cluster's device plugin, in addition to that for starts.

A vendor whose devices are offered individually, under the name of their CDI kind, needs nothing
here. Others have a module ``cluster`` in their folder, with a subclass of ``VendorCluster``.

``root`` is the driver root, for reading small files below it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from gpuhook.base.container.rootfs import Rootfs
from gpuhook.core.inventory.model import Device
from gpuhook.monitor.vendor_parts import part

Offers = dict[str, list[Device]]


@dataclass(frozen=True)
class RequestChannels:
    """The channels of containers' requests, as far as a vendor must know them.

    ``by_variable`` is whether gpu-py reads a variable or mounts, ``by_mounts`` whether it reads
    only mounts. ``unprivileged`` is whether variables of unprivileged containers count.
    """

    by_variable: bool
    by_mounts: bool
    unprivileged: bool


@dataclass(frozen=True)
class Extras:
    """The additional requests of every container with a device: by variables with values.

    Or by mounts, below the vendor's own folder, or by CDI devices. ``warnings`` are sentences for
    the administrator.
    """

    variables: dict[str, str] = field(default_factory=dict)
    mounts: tuple[str, ...] = ()
    cdi: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


class VendorCluster:
    """A vendor's implementation; this class is for devices that consist only of nodes.

    ``chosen`` are the administrator's settings of this vendor
    (``vendor_parts.PluginModule.settings``), None if there are none.
    """

    # The folder where programs in a container look for the driver's files if no runtime injects
    # them; "" for drivers whose files are in the image, or that have no such folder.
    driver_folder = ""
    # The value of the vendor's variable that every reader takes for no device.
    nothing = "void"
    # Whether errors that the driver reports count.
    listens = True
    # The names of the resources that its devices may have; () for only the CDI kind.
    resources: tuple[str, ...] = ()
    # The PCI vendor in node-feature-discovery's labels, "" for that of the vendor's names; and the
    # PCI classes there, "" for a label without a class.
    pci_vendor = ""
    pci_classes: tuple[str, ...] = ("1200",)  # processing accelerators
    # Why a device with parts has no name in CDI specs.
    unnamed = "only its parts have CDI names"

    def __init__(self, names: ModuleType, chosen: Any = None) -> None:
        self.names = names
        self.chosen = chosen

    def all_resources(self) -> tuple[str, ...]:
        """Return the names of all resources that devices of this vendor may have on some host.

        Parts whose resource is named by their size aren't included.
        """
        return self.resources or (str(self.names.KIND),)

    def node_labels(self) -> list[str]:
        """Return node-feature-discovery's labels of nodes with a PCI device of this vendor."""
        vendor = self.pci_vendor or self.names.PCI_VENDOR
        found = [f"{name}_{vendor}" if name else vendor for name in self.pci_classes if vendor]
        return [f"feature.node.kubernetes.io/pci-{each}.present" for each in found]

    def id(self, device: Device) -> str:
        """Return the cluster's id of a device, if possible the same after a reboot.

        It has at most 63 characters.
        """
        return device.id

    def resource(self, device: Device, root: Rootfs) -> str:  # noqa: ARG002
        """Return the name of the extended resource for such a device."""
        return str(self.names.KIND)

    def offers(self, inventory: Any, root: Rootfs) -> tuple[Offers, list[str]]:
        """Return the devices to offer, by resource, and warnings about them.

        Currently unusable devices are included, but no devices whose parts are offered.
        RequestError if the devices don't match the settings.
        """
        whole = {device.parent for device in inventory.devices}
        found: Offers = {}
        for device in inventory.devices:
            if device.id not in whole:
                found.setdefault(self.resource(device, root), []).append(device)
        return found, []

    def handed_out(self, device: Device) -> str:
        """Return the id of the offered device that is unhealthy if this device is."""
        return device.id

    def lost(self, inventory: Any, root: Rootfs) -> list[Device]:  # noqa: ARG002
        """Return the known devices that can't be reached any more."""
        state = "it can't be reached any more"
        return [Device(f"lost-{each}", str(each), {}, state=state) for each in inventory.lost]

    def variables(self, device: Device) -> dict[str, str]:  # noqa: ARG002
        """Return the variables that a device's programs need if gpu-py doesn't set them.

        The values of several devices are joined by commas.
        """
        return {}

    def links(self, inventory: Any) -> dict[str, dict[str, int]]:  # noqa: ARG002
        """Return the link scores between devices by the inventory, as in ``Resource.links``."""
        return {}

    def extras(self, options: Any, ways: RequestChannels, why_not: Callable[[], str]) -> Extras:  # noqa: ARG002
        """Set a request's options that every container gets in addition to devices, if possible.

        ``why_not`` returns why the current options can't be granted, "" if they can.
        """
        return Extras()


def of(names: ModuleType, chosen: Any = None) -> VendorCluster:
    """Return the implementation for the vendor with these names and settings."""
    module = part("cluster", names, "cluster")
    found: VendorCluster = (module.CLUSTER if module else VendorCluster)(names, chosen)
    return found

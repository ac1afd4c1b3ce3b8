"""What a cluster's device plugin asks of a vendor, beside what a container's start does.

A vendor whose devices are handed out one by one, under the name of their CDI kind, needs nothing
here. Others have a module ``cluster`` in their folder, with a subclass of this name.

``root`` is the driver root, to read small files below it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from gpuhook.ground.container.rootfs import Rootfs
from gpuhook.start.inventory.model import Device
from gpuhook.tools.vendors.parts import part

Offers = dict[str, list[Device]]


@dataclass(frozen=True)
class Ways:
    """How containers ask for what they get, as far as a vendor must know it.

    ``by_variable`` is whether a variable or mounts ask gpu-py, ``by_mounts`` whether mounts alone
    do. ``unprivileged`` is whether the variables of a container without privileges count.
    """

    by_variable: bool
    by_mounts: bool
    unprivileged: bool


@dataclass(frozen=True)
class Extras:
    """What every container with a device gets beside: by which variables it asks for that.

    Or by which mounts, below the vendor's own folder, or by which CDI devices. ``warnings`` are
    what a person should know, a sentence each.
    """

    variables: dict[str, str] = field(default_factory=dict)
    mounts: tuple[str, ...] = ()
    cdi: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


class Cluster:
    """A vendor's answers; these are for devices that are nodes alone.

    ``chosen`` is what the administrator chose of this vendor (``parts.Plugin.settings``), None
    where nothing was or could be.
    """

    # Where programs in a container look for the driver's files if no runtime puts them in; "" for
    # drivers whose files are in the image, or that have no such place.
    driver_folder = ""
    # The word in the vendor's variable by which every program that reads it gives nothing.
    nothing = "void"
    # Whether errors that the driver reports count.
    listens = True
    # Why a device with parts has no name in CDI documents.
    unnamed = "its parts alone have names for CDI"

    def __init__(self, names: ModuleType, chosen: Any = None) -> None:
        self.names = names
        self.chosen = chosen

    def id(self, device: Device) -> str:
        """Return what the cluster tells a device by: the same after a reboot, where there is such.

        At most 63 characters.
        """
        return device.id

    def resource(self, device: Device, root: Rootfs) -> str:  # noqa: ARG002
        """Return the name by which a pod asks for such a device."""
        return str(self.names.KIND)

    def offers(self, inventory: Any, root: Rootfs) -> tuple[Offers, list[str]]:
        """Return the devices to hand out, by resource, and what a person should know of them.

        Those that can't be used now are among them, and none whose parts can be asked for.
        RequestError where the devices don't fit what was chosen.
        """
        whole = {device.parent for device in inventory.devices}
        found: Offers = {}
        for device in inventory.devices:
            if device.id not in whole:
                found.setdefault(self.resource(device, root), []).append(device)
        return found, []

    def handed_out(self, device: Device) -> str:
        """Return the id of what can't be handed out while something is wrong with a device."""
        return device.id

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

    def extras(self, options: Any, ways: Ways, why_not: Callable[[], str]) -> Extras:  # noqa: ARG002
        """Put into a request's options what every container gets beside devices, where it can.

        ``why_not`` returns why a container can't have what the options ask for now, "" if it can.
        """
        return Extras()


def of(names: ModuleType, chosen: Any = None) -> Cluster:
    """Return the answers of the vendor with these names, by what was chosen of it."""
    module = part(names, "cluster")
    found: Cluster = (module.CLUSTER if module else Cluster)(names, chosen)
    return found

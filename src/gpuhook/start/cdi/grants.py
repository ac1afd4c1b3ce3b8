"""What a container gets by names of CDI devices: with all that belongs to them."""

from gpuhook.start.contract import Grant
from gpuhook.start.request.reader import Request

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from gpuhook.ground.config.model import Config
    from gpuhook.start.contract import Vendor
    from gpuhook.start.inventory.model import Device, Inventory

ALL = "all"
SOURCE = "cdi"  # of a request that a CDI document stands for


def grant(
    vendor: "Vendor", inventory: "Inventory", config: "Config", devices: "Iterable[Device]"
) -> Grant:
    """Return what a container gets that is given these devices, with all that belongs to them."""
    devices = tuple(devices)
    labels = tuple(device.label for device in devices)
    selectors = (ALL,) if devices == inventory.devices else labels
    options = vendor.everything(config)
    request = Request(vendor.names.NAME, SOURCE, labels, selectors=selectors, options=options)
    return Grant(vendor, request, inventory, devices)

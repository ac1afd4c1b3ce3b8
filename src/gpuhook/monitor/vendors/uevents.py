"""Selection of kernel events about accelerators and their drivers."""

from gpuhook.base.config.model import Config
from gpuhook.monitor.host.uevents import Event
from gpuhook.vendors import registry


def concerns_us(event: Event, config: Config) -> bool:
    """Tell whether a kernel event is about a known vendor's driver or one of its devices."""
    path, driver = str(event.get("DEVPATH", "")), str(event.get("DRIVER", ""))
    pci_vendor = str(event.get("PCI_ID", ""))[:4].lower()
    return any(
        (pci_vendor and pci_vendor == names.PCI_VENDOR)
        or driver in names.DRIVER_WORDS
        or any(word in path for word in names.DRIVER_WORDS)
        for names in registry.known(config).values()
    )

"""Queries of all vendors that this host has."""

import os
from collections.abc import Callable
from typing import TypeVar

from gpuhook.base.config.model import Config
from gpuhook.base.errors import DriverError, NoDriverError
from gpuhook.core.contract import Vendor, load
from gpuhook.monitor.host.uevents import Event
from gpuhook.vendors import registry
from gpuhook.vendors.registry import all_vendors

T = TypeVar("T")


def examine(
    config: Config, ask: Callable[[Vendor], T]
) -> tuple[dict[str, T], dict[str, NoDriverError], dict[str, DriverError]]:
    """Return the result of ``ask`` for each vendor, absent vendors, and failing drivers."""
    found, absent, failed = {}, {}, {}
    for name, names in all_vendors(config).items():
        try:
            found[name] = ask(load(names))
        except NoDriverError as error:
            absent[name] = error
        except DriverError as error:
            failed[name] = error
    return found, absent, failed


def present(config: Config, ask: Callable[[Vendor], T]) -> tuple[list[T], list[DriverError]]:
    """Return the result of ``ask`` for each vendor that this host has, and failing drivers.

    Without any result, raise the DriverError of the first failing driver, or else of the first
    absent one.
    """
    found, absent, failed = examine(config, ask)
    if not found:
        raise [*failed.values(), *absent.values()][0]
    return [*found.values()], [*failed.values()]


def concerns_us(event: Event, config: Config) -> bool:
    """Tell whether a kernel event is about a known vendor's driver or one of its devices."""
    path, driver = str(event.get("DEVPATH", "")), str(event.get("DRIVER", ""))
    pci_vendor = str(event.get("PCI_ID", ""))[:4].lower()
    return any(
        (pci_vendor and pci_vendor == names.PCI_VENDOR)
        or driver in names.DRIVER_WORDS
        or any(word in path for word in names.DRIVER_WORDS)
        for names in registry.all_vendors(config).values()
    )


def loaded(config: Config, exists: Callable[[str], bool] = os.path.lexists) -> list[str]:
    """Return the vendors whose driver is loaded, by its files in /dev, /proc and /sys."""
    found = []
    for name, names in all_vendors(config).items():
        root = config.driver_root_of(name).rstrip("/")
        if any(exists(root + path) for path in load(names).signs()):
            found.append(name)
    return found

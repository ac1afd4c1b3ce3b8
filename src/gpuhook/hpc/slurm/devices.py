"""The devices that Slurm can allocate on this host, in the order of Slurm's numbers."""

from collections.abc import Iterable
from typing import NamedTuple

from gpuhook.base.config.model import Config
from gpuhook.base.errors import DriverError, listed
from gpuhook.core import contract
from gpuhook.core.inventory.cache import get_inventory
from gpuhook.core.inventory.model import Device, Inventory
from gpuhook.core.inventory.selection import fallen_off
from gpuhook.monitor import vendor_parts
from gpuhook.monitor.vendors import survey

Links = dict[str, dict[str, int]]  # a device's id -> the others' -> the number of links


class VendorDevice(NamedTuple):
    """A device with its vendor and inventory."""

    vendor: contract.Vendor
    inventory: Inventory
    device: Device

    @property
    def model(self) -> str:
        """The product's name; for a partition, it includes the name of the whole device."""
        own = self.device.model
        wholes = [each for each in self.inventory.devices if each.id == self.device.parent]
        return " ".join([*(each.model for each in wholes if each.model not in own), own])

    @property
    def files(self) -> list[str]:
        """The host paths of the nodes that a job must be able to open to use the device.

        A partition needs the node of its whole device, too.
        """
        wholes = [each for each in self.inventory.devices if each.id == self.device.parent]
        paths = [path for each in (*wholes, self.device) for path in each.nodes]
        return self._on_host(dict.fromkeys(paths))

    @property
    def own_files(self) -> list[str]:
        """The host paths of the device's own nodes, without those of its whole device."""
        return self._on_host(self.device.nodes)

    def _on_host(self, paths: Iterable[str]) -> list[str]:
        return [f"{self.inventory.root.rstrip('/')}{path}" for path in paths]


class SlurmDevices(NamedTuple):
    """Devices to allocate, warnings about others, and errors of drivers."""

    devices: list[VendorDevice]
    warnings: list[str]
    failed: list[DriverError]


def devices_here(config: Config, *, whole: bool = True) -> SlurmDevices:
    """Return the host's devices; DriverError if no vendor's driver works here.

    ``whole`` requires all of the host's devices. In a job a driver knows only the job's devices,
    and then counts as failing.
    """

    def ask(vendor: contract.Vendor) -> tuple[list[VendorDevice], list[str]]:
        away = vendor.withheld(config) if whole else []
        if away:  # protects: gres-whole
            raise DriverError(
                f"A device cgroup denies this process access to {away[0]}, and Slurm would leave "
                "such devices open to all jobs",
                "Run this outside of the job, container or unit that has a part of the devices",
            )
        return _of(vendor, get_inventory(config, vendor, save=whole), config)

    found, failed = survey.present(config, ask)
    devices = [device for each, _ in found for device in each]
    return SlurmDevices(devices, [line for _, lines in found for line in lines], failed)


def _of(
    vendor: contract.Vendor, inventory: Inventory, config: Config
) -> tuple[list[VendorDevice], list[str]]:
    """Return a vendor's devices sorted by bus address, and the reasons why others are left out."""
    offered, warnings = vendor.offered(
        contract.Grant.of_document(vendor, inventory, config, inventory.devices)
    )
    if inventory.lost:
        warnings.append(fallen_off(inventory.lost, vendor.names))
    missing = set(inventory.missing())
    found = []
    for device in offered:
        absent = [path for path in device.nodes if path in missing]
        if absent:
            what = f"{vendor.names.NOUN} {device.label}"
            warnings.append(f"{what}: there is no device node {listed(absent)}")
        elif device.nodes:
            found.append(VendorDevice(vendor, inventory, device))
    # Partitions of one device, and devices without a bus address, stay in the order of discovery.
    return sorted(found, key=lambda each: _place(each.device.bus_id)), warnings


def links(devices: list[VendorDevice], config: Config) -> tuple[Links, list[str]]:
    """Return the number of links between whole devices, by their ids, and failures.

    Vendors with links have a module ``links``, whose scores count PER_LINK for each link.
    """
    found: Links = {}
    failures = []
    for name in dict.fromkeys(each.vendor.names.NAME for each in devices):
        first = next(each for each in devices if name == each.vendor.names.NAME)
        module = vendor_parts.links(first.vendor.names)
        if module is None:
            continue
        try:
            scores = module.links(config, first.inventory)
        except DriverError as error:
            failures.append(f"links between {first.vendor.names.NOUN}s are unknown: {error.cause}")
            continue
        for one, others in scores.items():
            counts = {other: score // module.PER_LINK for other, score in others.items()}
            found[one] = {other: count for other, count in counts.items() if count}
    return found, failures


def _place(bus_id: str) -> tuple[int, ...]:
    """Return a PCI address as a sort key; devices without one come last."""
    parts = bus_id.replace(".", ":").split(":")
    try:
        return 0, *(int(part, 16) for part in parts)
    except ValueError:
        return (1,)

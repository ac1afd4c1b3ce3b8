"""A vendor's devices for Dynamic Resource Allocation (DRA) in Kubernetes.

A driver describes its devices in objects (ResourceSlice), from which claims select. A vendor whose
devices have only a model and a driver needs no code of its own. Others have a subclass of
``Slices`` as SLICES in the module ``slices`` of their folder, or in ``cluster``. Names are those of
the vendor's own driver, so that existing claims keep working.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from gpuhook.base.config.model import Config
from gpuhook.base.container.rootfs import Rootfs
from gpuhook.cluster.vendors import cluster
from gpuhook.core.inventory.model import Device
from gpuhook.monitor.vendor_parts import part

UNHEALTHY = "unhealthy"  # the taint of a device without a more specific reason
KEEP_AWAY, SEND_AWAY = "NoSchedule", "NoExecute"  # a taint's effects, in the API's terms
_LONGEST = 63  # characters of a device's name, which is a DNS label
_STRANGE = re.compile(r"[^a-z0-9]+")
_NUMBERS = re.compile(r"[0-9]+(?:\.[0-9]+)*")


class Version(str):
    """A semantic version, which claims compare as such."""

    __slots__ = ()


Value = str | int | bool | tuple[int, ...]  # of an attribute; a Version is a str


@dataclass(frozen=True)
class PublishedDevice:
    """One device that claims may get, or a partition that could be created on one.

    ``attributes`` and ``capacity`` (in bytes, or units) have the names of the vendor's driver.
    ``uses`` is its consumption of the counter set ``counters``, which prevents that two devices get
    the same part of a GPU. ``reason`` says why it shouldn't be allocated now, ``taint`` is a word
    for that and ``value`` the taint's value. ``effect`` is KEEP_AWAY for new pods, or SEND_AWAY
    also for those that have it. ``id`` is the inventory's id of the device, "" if it doesn't exist.
    ``shares`` is the number of equal parts of its memory for several claims, 0 for parts of any
    size, None for a device that only one claim gets. ``withheld`` means that no claim may get it,
    because another program of this node shares it.
    """

    name: str
    bus_id: str
    attributes: Mapping[str, Value]
    capacity: Mapping[str, int] = field(default_factory=dict)
    counters: str = ""
    uses: Mapping[str, int] = field(default_factory=dict)
    reason: str = ""
    taint: str = UNHEALTHY
    value: str = ""
    id: str = ""
    effect: str = KEEP_AWAY
    shares: int | None = None
    withheld: bool = False


@dataclass(frozen=True)
class Offer:
    """All devices that a driver offers here, with its counter sets and ``warnings``."""

    devices: tuple[PublishedDevice, ...]
    counters: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class DeviceClass:
    """A named class of a driver's devices.

    ``expression`` is in CEL; ``resource`` is the name that pods without a claim may request.
    """

    name: str
    expression: str
    resource: str = ""


class Slices:
    """A vendor's functions for DRA; these defaults are for devices without further facts."""

    driver = ""  # the name of the vendor's own driver; "" for the first part of the CDI kind
    lost_taint = "lost"

    def __init__(self, names: ModuleType) -> None:
        self.names = names
        self.driver = self.driver or str(names.KIND).partition("/")[0]
        self.cluster = cluster.of(names)

    def offer(self, config: Config, inventory: Any, root: Rootfs, *, dynamic: bool) -> Offer:
        """Return the devices to claim, without whole devices that have partitions.

        ``dynamic`` also offers partitions that could be created. ``root`` is the driver root.
        """
        whole = {device.parent for device in inventory.devices}
        found = [
            self.published(device, inventory, root)
            for device in inventory.devices
            if device.id not in whole
        ]
        found += [self.lost(device, root) for device in self.cluster.lost(inventory, root)]
        return Offer(tuple(found))

    def published(self, device: Device, inventory: Any, root: Rootfs) -> PublishedDevice:
        """Return a device in its published form."""
        return PublishedDevice(
            self.name(device, root),
            device.bus_id,
            self.attributes(device, inventory, root),
            self.capacity(device, inventory, root),
            reason=why_not(device, inventory),
            id=device.id,
        )

    def lost(self, device: Device, root: Rootfs) -> PublishedDevice:
        """Return the published form of a device that exists but can't be reached."""
        about = {"type": self.names.TYPES[0]}
        return PublishedDevice(
            self.name(device, root), "", about, reason=device.state, taint=self.lost_taint
        )

    def taint(self, event: Mapping[str, Any]) -> tuple[str, str]:
        """Return the taint and its value for an event of the vendor's ``events``; {} for none."""
        return self.lost_taint if "lost" in event else UNHEALTHY, ""

    def effect(self, event: Mapping[str, Any]) -> str:
        """Return the taint's effect for an event of the vendor's ``events``."""
        return KEEP_AWAY

    def name(self, device: Device, root: Rootfs) -> str:
        """Return the name of a device in claims, which is stable over reboots."""
        return device_name(self.names.TYPES[bool(device.parent)], self.cluster.id(device))

    def attributes(self, device: Device, inventory: Any, root: Rootfs) -> dict[str, Value]:
        """Return attributes of a device for claims, in addition to its location in the host."""
        found: dict[str, Value] = {
            "type": self.names.TYPES[bool(device.parent)],
            "model": device.model,
        }
        return {**found, **version("driverVersion", inventory.version)}

    def capacity(self, device: Device, inventory: Any, root: Rootfs) -> dict[str, int]:
        """Return the countable capacities of a device."""
        return {}

    def classes(self, driver: str, resource: str) -> list[DeviceClass]:
        """Return the classes of its devices, for a driver of this name.

        ``resource`` is the only resource of the devices, "" if there are several or none.
        """
        return [DeviceClass(driver, f'device.driver == "{driver}"', resource)]


def of(names: ModuleType) -> Slices:
    """Return the DRA functions of the vendor with these names."""
    module = part("cluster", names, "slices") or part("cluster", names, "cluster")
    found: Slices = getattr(module, "SLICES", Slices)(names)
    return found


def only(resources: Iterable[str]) -> str:
    """Return the resource of a class whose devices have these, "" if there isn't exactly one."""
    found = {*resources}
    return found.pop() if len(found) == 1 else ""


def device_name(*words: str) -> str:
    """Return words as a device's name: lower case, digits and dashes, at most 63 characters."""
    text = _STRANGE.sub("-", "-".join(words).lower()).strip("-") or "device"
    if len(text) <= _LONGEST:
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return f"{text[: _LONGEST - 9].rstrip('-')}-{digest}"


def semantic(text: str) -> str:
    """Return the numbers at the start of a version as a semantic version, "" if there are none.

    There are always three, without leading zeros: 580.65.06 is 580.65.6. A suffix is left out,
    because it would make a version older than the one without.
    """
    match = _NUMBERS.match(text)
    if match is None:
        return ""
    words = [*match[0].split("."), "0", "0"][:3]
    return ".".join(str(int(word[:9])) for word in words)


def version(name: str, text: str) -> dict[str, Value]:
    """Return an attribute with a version, none if the text isn't a version."""
    found = semantic(text)
    return {name: Version(found)} if found else {}


def why_not(device: Device, inventory: Any) -> str:
    """Return why a device can't be allocated now, "" if it can."""
    if device.state:
        return device.state
    whole = next((each for each in inventory.devices if each.id == device.parent), None)
    wanted = [*device.nodes, *(whole.nodes if whole else ())]
    missing = [path for path in wanted if path in {*inventory.missing()}]
    return f"there is no device node {missing[0]}" if missing else ""

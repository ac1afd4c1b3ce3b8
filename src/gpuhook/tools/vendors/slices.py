"""What a vendor's devices are for Dynamic Resource Allocation (DRA), Kubernetes' newer way.

A driver describes its devices in objects (ResourceSlice), and claims choose by what these say. A
vendor whose devices have a model and a driver, and no more, needs nothing here. Others have a
module ``slices`` in their folder, with a subclass of this name. Names are those of the maker's own
driver, so that people's claims stay as they are.
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from gpuhook.ground.config.model import Config
from gpuhook.ground.container.rootfs import Rootfs
from gpuhook.start.inventory.model import Device
from gpuhook.tools.vendors import cluster
from gpuhook.tools.vendors.parts import part

UNHEALTHY = "unhealthy"  # the taint of a device of which no more is known
KEEP_AWAY, SEND_AWAY = "NoSchedule", "NoExecute"  # a taint's effects, as the API has them
_LONGEST = 63  # characters of a device's name, which is a label of DNS
_STRANGE = re.compile(r"[^a-z0-9]+")
_NUMBERS = re.compile(r"[0-9]+(?:\.[0-9]+)*")


class Version(str):
    """A version as semantic versioning has it, which claims compare as such."""

    __slots__ = ()


Value = str | int | bool  # of an attribute; a Version is one


@dataclass(frozen=True)
class Published:
    """One device that claims may be given, or a part that could be made of one.

    ``attributes`` and ``capacity`` (in bytes, or pieces) have the names of the vendor's driver.
    Of the set of counters ``counters`` it uses ``uses``: what two devices use of one thing doesn't
    go to both. ``reason`` says why nobody should be given it now, ``taint`` is a word for that and
    ``value`` the taint's value; ``effect`` is what becomes of pods: KEEP_AWAY new ones, or
    SEND_AWAY those that have it, too. ``id`` is the inventory's for the device, "" for what there
    is not. ``shares`` is in how many equal parts of its memory several claims may have it, 0 for
    parts of any size, None for a device that goes to one claim. ``withheld`` is whether no claim
    may have it, because another program of this node shares it.
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
    """All that a driver offers here, with its sets of counters; ``warnings`` are for a person."""

    devices: tuple[Published, ...]
    counters: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class DeviceClass:
    """Which devices of the driver a claim means by a name.

    ``expression`` is in CEL; ``resource`` is what pods without a claim may ask for instead.
    """

    name: str
    expression: str
    resource: str = ""


class Slices:
    """A vendor's answers; these are for devices of which nothing more is known."""

    driver = ""  # the name of the maker's own driver; "" for none
    lost_taint = "lost"

    def __init__(self, names: ModuleType) -> None:
        self.names = names
        self.cluster = cluster.of(names)

    def offer(self, config: Config, inventory: Any, root: Rootfs, *, dynamic: bool) -> Offer:
        """Return what there is to claim: no whole device that has parts.

        ``dynamic`` is whether parts that could be made are offered, too. ``root`` is the driver
        root.
        """
        whole = {device.parent for device in inventory.devices}
        found = [
            self.published(device, inventory, root)
            for device in inventory.devices
            if device.id not in whole
        ]
        found += [self.lost(device, root) for device in self.cluster.lost(inventory, root)]
        return Offer(tuple(found))

    def published(self, device: Device, inventory: Any, root: Rootfs) -> Published:
        """Return a device as it is published."""
        return Published(
            self.name(device, root),
            device.bus_id,
            self.attributes(device, inventory, root),
            self.capacity(device, inventory, root),
            reason=why_not(device, inventory),
            id=device.id,
        )

    def lost(self, device: Device, root: Rootfs) -> Published:
        """Return a device that is there and can't be reached."""
        about = {"type": self.names.TYPES[0]}
        return Published(
            self.name(device, root), "", about, reason=device.state, taint=self.lost_taint
        )

    def taint(self, event: Mapping[str, Any]) -> tuple[str, str]:
        """Return a word and a value for what the vendor's ``events`` reported; {} for nothing."""
        return self.lost_taint if "lost" in event else UNHEALTHY, ""

    def effect(self, event: Mapping[str, Any]) -> str:
        """Return the effect of the taint for what the vendor's ``events`` reported."""
        return KEEP_AWAY

    def name(self, device: Device, root: Rootfs) -> str:
        """Return the name by which a claim is told a device: the same after a reboot."""
        return device_name(self.names.TYPES[bool(device.parent)], self.cluster.id(device))

    def attributes(self, device: Device, inventory: Any, root: Rootfs) -> dict[str, Value]:
        """Return what claims may ask of a device, beside where it is in the machine."""
        found: dict[str, Value] = {
            "type": self.names.TYPES[bool(device.parent)],
            "model": device.model,
        }
        return {**found, **version("driverVersion", inventory.version)}

    def capacity(self, device: Device, inventory: Any, root: Rootfs) -> dict[str, int]:
        """Return how much a device has of what can be counted."""
        return {}

    def classes(self, driver: str, inventory: Any, root: Rootfs) -> list[DeviceClass]:
        """Return the names for its devices, where the driver is called so."""
        named = {self.cluster.resource(device, root) for device in inventory.devices}
        resource = named.pop() if len(named) == 1 else ""
        return [DeviceClass(driver, f'device.driver == "{driver}"', resource)]


def of(names: ModuleType) -> Slices:
    """Return the answers of the vendor with these names."""
    module = part(names, "slices")
    found: Slices = (module.SLICES if module else Slices)(names)
    return found


def device_name(*words: str) -> str:
    """Return words as a device's name: small letters, digits and dashes, at most 63 characters."""
    text = _STRANGE.sub("-", "-".join(words).lower()).strip("-") or "device"
    if len(text) <= _LONGEST:
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return f"{text[: _LONGEST - 9].rstrip('-')}-{digest}"


def semantic(text: str) -> str:
    """Return the numbers that a version begins with as a semantic version, "" where there is none.

    Always three, and none with a zero before it: 580.65.06 is 580.65.6. What follows is left out,
    because it would make a version older than the one without.
    """
    match = _NUMBERS.match(text)
    if match is None:
        return ""
    words = [*match[0].split("."), "0", "0"][:3]
    return ".".join(str(int(word[:9])) for word in words)


def version(name: str, text: str) -> dict[str, Value]:
    """Return an attribute with a version, none where the text is no version."""
    found = semantic(text)
    return {name: Version(found)} if found else {}


def why_not(device: Device, inventory: Any) -> str:
    """Return why a device can't be given to anybody now, "" if it can."""
    if device.state:
        return device.state
    whole = next((each for each in inventory.devices if each.id == device.parent), None)
    wanted = [*device.nodes, *(whole.nodes if whole else ())]
    missing = [path for path in wanted if path in {*inventory.missing()}]
    return f"there is no device node {missing[0]}" if missing else ""

"""The resource.k8s.io/v1 objects that this host publishes for Dynamic Resource Allocation.

Pure, except for what vendors read. The limits are the API server's; it rejects a whole slice that
has one device too many.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gpuhook.base.config.model import Config
from gpuhook.base.container.rootfs import Rootfs
from gpuhook.base.errors import DriverError, RequestError, shown
from gpuhook.cluster.vendors import slices
from gpuhook.cluster.vendors.slices import DeviceClass, PublishedDevice, Value, Version
from gpuhook.core.contract import Vendor
from gpuhook.core.inventory.model import Inventory
from gpuhook.monitor import memory_limit_support
from gpuhook.monitor.vendors import pci

API = "resource.k8s.io/v1"
# The first version of Kubernetes whose slices hold either devices or counters, not both.
COUNTERS_APART = (1, 35)
OLDEST = (1, 34)  # the first with this version of the API
_STANDARD = "resource.kubernetes.io"
_MOST, _MOST_COUNTED = 128, 64  # devices of a slice; if any has taints, lists or uses counters
_MOST_SETS = 8  # counter sets of a slice
_MOST_COUNTERS = 32  # counters of all sets of a slice that also has devices
_MOST_USED = 1024  # counters that all devices of a slice consume together
_MOST_FACTS = 32  # attributes and capacities of a device
_MOST_LISTED = 16  # numbers of the only list, because a device may have 48 values
_LONGEST_VALUE = 64  # bytes
_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_DOMAIN = re.compile(rf"{_LABEL}(\.{_LABEL})*")
_PCI = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
MEMORY = "memory"  # the capacity that is shared
_MEBI = 1 << 20
_UNITS = ("", "Ki", "Mi", "Gi", "Ti", "Pi")


@dataclass(frozen=True)
class Choices:
    """The administrator's choices: names, and the version of Kubernetes.

    ``drivers`` are by vendor; an empty ``pool`` means the node's name. ``shares`` has each vendor's
    value for ``PublishedDevice.shares``. ``lists`` is whether the cluster accepts attributes with
    lists.
    """

    node: str
    pool: str = ""
    drivers: Mapping[str, str] = field(default_factory=dict)
    dynamic: bool = False
    kubernetes: tuple[int, int] = COUNTERS_APART
    shares: Mapping[str, int] = field(default_factory=dict)
    lists: bool = False


@dataclass
class SliceDriver:
    """The devices that one driver publishes, of one vendor or of several with the same driver name.

    ``vendors`` has each device's vendor, by the device's name.
    """

    name: str
    devices: dict[str, PublishedDevice] = field(default_factory=dict)
    counters: dict[str, Mapping[str, int]] = field(default_factory=dict)
    vendors: dict[str, tuple[Vendor, Inventory]] = field(default_factory=dict)
    classes: dict[str, DeviceClass] = field(default_factory=dict)
    places: dict[str, dict[str, Value]] = field(default_factory=dict)


@dataclass(frozen=True)
class HealthProblem:
    """The reason why a device is unhealthy, with its taint.

    The taint has a key (here without its domain), a value and an effect.
    """

    reason: str
    taint: str = slices.UNHEALTHY
    value: str = ""
    effect: str = slices.KEEP_AWAY


# Each driver's devices, by the driver's name and theirs, as ``described`` returns them.
Drivers = Mapping[str, "SliceDriver"]


def objects(
    found: Sequence[tuple[Vendor, Inventory]], choices: Choices, config: Config
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return DeviceClasses and ResourceSlices, and warnings, a sentence each.

    RequestError for invalid names. A problem with one vendor never affects the others.
    """
    drivers, warnings = described(found, choices, config)
    return rendered(drivers, choices), warnings


def described(
    found: Sequence[tuple[Vendor, Inventory]], choices: Choices, config: Config
) -> tuple[dict[str, "SliceDriver"], list[str]]:
    """Return what each driver publishes, by its name, and warnings; raises as ``objects``.

    May query drivers, in children with a time limit.
    """
    _check(choices)
    drivers: dict[str, SliceDriver] = {}
    warnings: list[str] = []
    for vendor, inventory in found:
        try:
            with Rootfs(inventory.root) as root:
                warnings += _collect(drivers, vendor, inventory, root, choices, config)
        except OSError as error:
            why = f"the driver root {inventory.root} can't be read: {error.strerror}"
            warnings.append(f"{vendor.names.TITLE}'s devices aren't published: {why}")
        except DriverError as error:
            warnings.append(f"{vendor.names.TITLE}'s devices aren't published: {error.cause}")
    return drivers, warnings


def troubled(drivers: Drivers, troubles: Mapping[str, HealthProblem]) -> dict[str, "SliceDriver"]:
    """Return the drivers with taints on unhealthy devices; ``troubles`` are by inventory id."""
    found = {}
    for name, driver in drivers.items():
        devices = {
            each.name: replace(
                each,
                reason=trouble.reason,
                taint=trouble.taint,
                value=trouble.value,
                effect=trouble.effect,
            )
            if (trouble := troubles.get(each.id)) is not None and not each.reason
            else each
            for each in driver.devices.values()
        }
        found[name] = replace(driver, devices=devices)
    return found


def withheld(drivers: Drivers, taken: Collection[tuple[str, str]]) -> dict[str, "SliceDriver"]:
    """Return the drivers without offering devices that another program of this node shares.

    ``taken`` are pairs of a vendor and the inventory's id. What could be made of such a device is
    withheld, too.
    """
    found = {}
    for name, driver in drivers.items():
        its = {
            each.name
            for each in driver.devices.values()
            if (driver.vendors[each.name][0].names.NAME, each.id) in taken
        }
        counters = {driver.devices[each].counters for each in its} - {""}
        devices = {
            each.name: replace(each, withheld=True)
            if each.name in its or each.counters in counters
            else each
            for each in driver.devices.values()
        }
        found[name] = replace(driver, devices=devices)
    return found


def rendered(drivers: Drivers, choices: Choices) -> list[dict[str, Any]]:
    """Return the DeviceClasses and ResourceSlices of drivers; pure."""
    made: list[dict[str, Any]] = []
    served: set[str] = set()
    for driver in drivers.values():
        for each in driver.classes.values():
            made.append(_class(each, served))
            served.add(each.resource)
    for driver in drivers.values():
        made += [*_slices(driver, choices)]
    return made


def _check(choices: Choices) -> None:
    names = {"node": choices.node, "pool": choices.pool or choices.node}
    names.update({f"driver of {key}": name for key, name in choices.drivers.items()})
    for what, name in names.items():
        most = 63 if what.startswith("driver") else 253
        parts = name.split("/") if what == "pool" else [name]
        if len(name) > most or not all(_DOMAIN.fullmatch(part) for part in parts):
            raise RequestError(
                f"{shown(name)} can't be the name of a {what}",
                f"Use only lower-case letters, digits, - and ., at most {most} characters",
            )
    if choices.kubernetes < OLDEST:
        raise RequestError(
            "Kubernetes before 1.34 uses another version of these objects", "Use 1.34 or newer"
        )


def driver_of(vendor: Vendor, choices: Choices) -> str:
    """Return a vendor's driver name: the chosen one, or that of ``Slices``."""
    names = vendor.names
    return choices.drivers.get(names.NAME) or slices.of(names).driver


def _collect(
    drivers: dict[str, SliceDriver],
    vendor: Vendor,
    inventory: Inventory,
    root: Rootfs,
    choices: Choices,
    config: Config,
) -> list[str]:
    """Add what a vendor publishes; return warnings."""
    name = driver_of(vendor, choices)
    answers = slices.of(vendor.names)
    offer = answers.offer(config, inventory, root, dynamic=choices.dynamic)
    driver = drivers.setdefault(name, SliceDriver(name))
    warnings = [*offer.warnings]
    for device in offer.devices:
        if vendor.names.NAME in choices.shares:
            device, why = _shared(device, vendor, inventory, choices, config)  # noqa: PLW2901
            warnings += why
        if device.name in driver.devices:
            warnings.append(f"Two devices would be {device.name}: the second isn't published")
            continue
        driver.devices[device.name] = device
        driver.vendors[device.name] = vendor, inventory
        driver.places[device.name] = _place(root, device.bus_id, lists=choices.lists)
        if device.reason:
            warnings.append(f"{device.name} is tainted: {device.reason}")
    driver.counters.update(offer.counters)
    resources = (answers.cluster.resource(each, root) for each in inventory.devices)
    for each in answers.classes(name, slices.only(resources)):
        driver.classes.setdefault(each.name, each)
    return warnings


def _shared(
    given: PublishedDevice, vendor: Vendor, inventory: Inventory, choices: Choices, config: Config
) -> tuple[PublishedDevice, list[str]]:
    """Return a device as several claims may share it, and the reason if it isn't shared.

    A share is a memory limit, so the device must enforce one. Partitions aren't shared.
    """
    device = next((each for each in inventory.devices if each.id == given.id), None)
    if given.reason or given.counters or device is None:
        return given, []
    if not given.capacity.get(MEMORY):
        return given, [f"{given.name} isn't shared: its memory size is unknown"]
    problem = memory_limit_support.what_it_takes(vendor, inventory, config, (device,))
    if problem is not None:  # protects: dra-shared-limits
        return given, [f"{given.name} isn't shared: {problem.cause}"]
    return replace(given, shares=choices.shares[vendor.names.NAME]), []


def _place(root: Rootfs, bus_id: str, *, lists: bool = False) -> dict[str, Value]:
    """Return the known ones of the attributes that all vendors' devices have in common."""
    if not _PCI.fullmatch(bus_id.lower()):
        return {}
    found: dict[str, Value] = {f"{_STANDARD}/pciBusID": bus_id.lower()}
    above = pci.complex_of(root, bus_id)
    if above:
        found[f"{_STANDARD}/pcieRoot"] = above
    nodes = pci.numa_nodes(root, bus_id)[: _MOST_LISTED if lists else 1]
    if nodes:
        found[f"{_STANDARD}/numaNode"] = nodes if len(nodes) > 1 else nodes[0]
    return found


# Objects ----------------------------------------------------------------------------------------


def _class(given: DeviceClass, served: set[str]) -> dict[str, Any]:
    """Return a DeviceClass, without an extended resource that another class already has."""
    spec: dict[str, Any] = {"selectors": [{"cel": {"expression": given.expression}}]}
    if given.resource and given.resource not in served:
        spec["extendedResourceName"] = given.resource
    return {
        "apiVersion": API, "kind": "DeviceClass", "metadata": {"name": given.name}, "spec": spec,
    }  # fmt: skip


def _slices(driver: SliceDriver, choices: Choices) -> Iterator[dict[str, Any]]:
    # protects: dra-mps-not-published
    devices = [each for each in driver.devices.values() if not each.withheld]
    apart = choices.kubernetes >= COUNTERS_APART
    contents = [*(_apart(driver, devices) if apart else _together(driver, devices))] or [
        {"devices": []}
    ]
    for number, content in enumerate(contents):
        pool = {
            "name": choices.pool or choices.node,
            "generation": 1,
            "resourceSliceCount": len(contents),
        }
        name = f"{number:05x}-{driver.name}-{choices.node}"
        yield {
            "apiVersion": API,
            "kind": "ResourceSlice",
            "metadata": {"name": name},
            "spec": {"driver": driver.name, "nodeName": choices.node, "pool": pool, **content},
        }


def _apart(driver: SliceDriver, devices: list[PublishedDevice]) -> Iterator[dict[str, Any]]:
    """Yield the contents of slices for 1.35 and later: either counters or devices."""
    used = {device.counters for device in devices}
    names = [name for name in driver.counters if name in used]
    for at in range(0, len(names), _MOST_SETS):
        yield {"sharedCounters": _sets(driver, names[at : at + _MOST_SETS])}
    for group in _groups([[device] for device in devices], {}, driver):
        yield {"devices": [_device(driver, device) for device in group]}


def _together(driver: SliceDriver, devices: list[PublishedDevice]) -> Iterator[dict[str, Any]]:
    """Yield the contents of slices for 1.34: counters together with all devices that use them."""
    alone = [[device] for device in devices if not device.counters]
    users = [[each for each in devices if each.counters == name] for name in driver.counters]
    for group in [*_groups(users, driver.counters, driver), *_groups(alone, {}, driver)]:
        sets = [*dict.fromkeys(device.counters for device in group if device.counters)]
        found = {"sharedCounters": _sets(driver, sets)} if sets else {}
        yield {**found, "devices": [_device(driver, device) for device in group]}


def _groups(
    together: Iterable[list[PublishedDevice]],
    counters: Mapping[str, Mapping[str, int]],
    driver: SliceDriver,
) -> Iterator[list[PublishedDevice]]:
    """Yield the devices of each slice in order; the devices of one list stay in one slice."""
    group: list[PublishedDevice] = []
    for devices in together:
        if group and not _fits([*group, *devices], counters, driver):
            yield group
            group = []
        group = [*group, *devices]
    if group:
        yield group


def _fits(
    group: list[PublishedDevice], counters: Mapping[str, Mapping[str, int]], driver: SliceDriver
) -> bool:
    sets = {device.counters for device in group if device.counters in counters}
    counted = any(
        device.counters or device.reason or _has_list(driver.places[device.name])
        for device in group
    )
    return (
        len(group) <= (_MOST_COUNTED if counted else _MOST)
        and len(sets) <= _MOST_SETS
        and sum(len(counters[name]) for name in sets) <= _MOST_COUNTERS
        and sum(len(device.uses) for device in group) <= _MOST_USED
    )


def _has_list(facts: Mapping[str, Value]) -> bool:
    return any(isinstance(each, tuple) for each in facts.values())


def _sets(driver: SliceDriver, names: Sequence[str]) -> list[dict[str, Any]]:
    return [{"name": name, "counters": _counts(driver.counters[name])} for name in names]


def attributes(driver: SliceDriver, given: PublishedDevice) -> dict[str, Any]:
    """Return the attributes of a driver's device, with their types; pure."""
    facts = {**given.attributes, **driver.places[given.name]}
    space = _MOST_FACTS - len(given.capacity)
    return {name: _value(value) for name, value in [*facts.items()][:space]}


def _device(driver: SliceDriver, given: PublishedDevice) -> dict[str, Any]:
    made: dict[str, Any] = {"name": given.name, "attributes": attributes(driver, given)}
    if given.capacity:
        made["capacity"] = _counts(given.capacity)
    if given.shares is not None:
        made["allowMultipleAllocations"] = True
        made["capacity"][MEMORY]["requestPolicy"] = _policy(given.capacity[MEMORY], given.shares)
    if given.uses:
        used = {"counterSet": given.counters, "counters": _counts(given.uses)}
        made["consumesCounters"] = [used]
    if given.reason:
        value = {"value": given.value} if given.value else {}
        key = f"{driver.name}/{given.taint}"
        made["taints"] = [{"key": key, **value, "effect": given.effect}]
    return made


def _policy(memory: int, shares: int) -> dict[str, Any]:
    """Return the request policy for ``memory`` bytes: one share, or any size.

    A claim without a size gets one share, or all the memory. Sizes are whole MiB.
    """
    most = memory // max(shares, 1) // _MEBI * _MEBI
    if shares:
        return {"default": quantity(most), "validValues": [quantity(most)]}
    step = quantity(_MEBI)
    sizes = {"min": step, "max": quantity(most), "step": step}
    return {"default": quantity(most), "validRange": sizes}


def _value(value: Value) -> dict[str, Any]:
    """Return an attribute's value under its type's name; a text is truncated to 64 bytes."""
    if isinstance(value, bool):
        return {"bool": value}
    if isinstance(value, int):
        return {"int": value}
    if isinstance(value, tuple):
        return {"ints": [*value]}
    text = value.encode()[:_LONGEST_VALUE].decode(errors="ignore")
    return {"version" if isinstance(value, Version) else "string": text}


def _counts(counts: Mapping[str, int]) -> dict[str, Any]:
    return {name: {"value": quantity(count)} for name, count in counts.items()}


def quantity(count: int) -> str:
    """Return a count in Kubernetes' notation, such as 141Gi if 1024 divides it evenly."""
    unit = 0
    while count and count % 1024 == 0 and unit < len(_UNITS) - 1:
        count, unit = count // 1024, unit + 1
    return f"{count}{_UNITS[unit]}"

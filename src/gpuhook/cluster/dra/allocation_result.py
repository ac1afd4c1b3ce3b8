"""A claim's allocated devices on this node, with the plan for each of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gpuhook.base.config.model import Config
from gpuhook.base.errors import PluginError, RequestError, shown
from gpuhook.base.sizes import Size, amount, parse_quantity
from gpuhook.cluster.dra import configs, document
from gpuhook.cluster.dra.devices import ClaimableDevice, DeviceRegistry
from gpuhook.cluster.dra.document import ClaimDevice
from gpuhook.cluster.dra.slices import MEMORY
from gpuhook.cluster.vendors import cluster
from gpuhook.core.contract import Grant, Vendor
from gpuhook.core.inventory.model import Device, Inventory
from gpuhook.core.request.reader import Request
from gpuhook.core.request.sources import SOURCE, memory_limit_place
from gpuhook.monitor import memory_limit_support
from gpuhook.monitor.ledger.records import HeldDevice

TRY_AGAIN = "The kubelet tries again; if that keeps failing, delete the pod to get other devices"
MOUNT_OPTIONS = ("ro", "nosuid", "nodev", "noexec", "rbind", "rprivate")

Ref = Mapping[str, str]  # namespace, name and uid of a claim


@dataclass(frozen=True)
class AllocationResult:
    """A device of a claim: its record, its entry in the CDI spec, and its vendor's plan."""

    held: HeldDevice
    given: ClaimDevice
    plan: Mapping[str, Any] = field(default_factory=dict)


def allotted(
    devices: DeviceRegistry, driver: str, ref: Ref, claim: Mapping[str, Any]
) -> list[AllocationResult]:
    """Return a claim's devices of a driver; PluginError or RequestError if they can't be used."""
    allocation = _allocation(claim, ref)
    every = [each for each in allocation.get("results") or [] if each.get("driver") == driver]
    reading = _ResultReader(devices, driver, ref["uid"], allocation.get("config") or [])
    return [reading.one(each) for each in every]


def _allocation(claim: Mapping[str, Any], ref: Ref) -> Mapping[str, Any]:
    """Return a claim's allocation; PluginError if there is none, or the uid is another claim's."""
    uid = (claim.get("metadata") or {}).get("uid")
    if uid != ref["uid"]:  # protects: dra-uid
        raise PluginError(
            f"The claim {ref['namespace']}/{ref['name']} was replaced by another: its uid is "
            f"{shown(str(uid))}, and the kubelet asks for {ref['uid']}",
            "The kubelet starts the new claim's pod by itself",
        )
    allocation = (claim.get("status") or {}).get("allocation")
    if not isinstance(allocation, dict):
        raise PluginError(
            f"The claim {ref['namespace']}/{ref['name']} has no allocation",
            "Look at `kubectl describe resourceclaim`; the scheduler allocates devices",
        )
    found: Mapping[str, Any] = allocation.get("devices") or {}
    return found


class _ResultReader:
    """The reader of one claim's allocation."""

    def __init__(self, devices: DeviceRegistry, driver: str, uid: str, config: list[Any]) -> None:
        self._devices = devices
        self._driver = driver
        self._uid = uid
        self._config = config
        self._known = {each.name: each for each in devices.look() if each.driver == driver}
        self._pool = devices.choices.pool or devices.choices.node
        self._names: list[str] = []  # in the CDI spec

    def one(self, result: Mapping[str, Any]) -> AllocationResult:
        """Return the device of one result."""
        name = shown(str(result.get("device")))
        if result.get("pool") != self._pool:  # protects: dra-pool
            raise PluginError(
                f"The claim was allocated {name} of the pool "
                f"{shown(str(result.get('pool')))}, and this node's is {self._pool}",
                "Start gpuhook dra with the --pool and --node with which it published devices",
            )
        known = self._known.get(str(result.get("device")))
        if known is None or known.device is None or known.is_lost:  # protects: dra-lost
            why = "isn't here" if known is None else "can't be reached any more"
            raise PluginError(f"The device {name} of {self._driver} {why}", TRY_AGAIN)
        failure = self._devices.failure(known)
        if failure:  # protects: dra-hangs
            raise PluginError(
                f"The device {known.name} can't be allocated now: {failure}", TRY_AGAIN
            )
        return self._allotted(result, known, known.device)

    def _allotted(
        self, result: Mapping[str, Any], known: ClaimableDevice, device: Device
    ) -> AllocationResult:
        share = str(result.get("shareID") or "")
        request = str(result.get("request", ""))
        vendor, inventory = self._devices.found(known)
        answers = cluster.of(vendor.names)
        by_id = {each.id: each for each in inventory.devices}
        name = self._name(f"{self._uid}-{known.name}{f'-{share}' if share else ''}")
        consumed = _consumed(result)
        wish = configs.wish(
            self._config, self._driver, request, vendor.names, is_part=bool(device.parent)
        )
        sizes = [each for each in (wish.memory, consumed) if each is not None]
        if share and (consumed is None or wish.plan):  # protects: dra-shares
            raise RequestError(
                f"The claim shares {known.name} with others, and gpuhook supports only shares "
                "with a memory limit",
                "Request some of the capacity memory, without a configuration of the vendor",
            )
        is_admin = result.get("adminAccess") is True
        if is_admin and wish.plan:  # protects: dra-admin-changes-nothing
            raise RequestError(
                f"The claim has adminAccess to {known.name}, and a configuration that would change "
                "it for its other users",
                f"Remove the request {shown(request)} from it, or use a class that has none",
            )
        held = HeldDevice(
            request.partition("/")[0],
            self._pool,
            known.name,
            admin=is_admin,
            share=share,
            consumed={MEMORY: consumed.number} if consumed else {},
            vendor=known.vendor,
            unit=answers.id(device),
            whole=answers.id(by_id.get(known.parent, device)),
            cdi=(f"{document.kind(self._driver)}={name}",),
        )
        limit = min(
            (_bytes(vendor, inventory, device, self._devices.config, size) for size in sizes),
            default=0,
        )
        more = {"mounts": [_memory_limit_mount(vendor, device, limit)]} if limit else {}
        given = ClaimDevice(name, device, vendor, inventory, more, with_hook=bool(limit))
        return AllocationResult(held, given, wish.plan)

    def _name(self, usual: str) -> str:
        """Return a unique name: a device may be listed twice, once through adminAccess."""
        count = self._names.count(usual)
        self._names.append(usual)
        return f"{usual}-{count + 1}" if count else usual  # protects: dra-device-twice


def _consumed(result: Mapping[str, Any]) -> Size | None:
    """Return a result's share of a device's memory, None if it has no such entry."""
    consumed = result.get("consumedCapacity") or {}
    texts = [text for key, text in consumed.items() if key.rpartition("/")[2] == MEMORY]
    if not texts:
        return None
    number = parse_quantity(texts[0])
    if number is None:
        raise RequestError(
            f"The allocation says {shown(str(texts[0]))} of the capacity memory", TRY_AGAIN
        )
    return Size(str(texts[0]), number)


def _bytes(vendor: Vendor, inventory: Inventory, device: Device, config: Config, size: Size) -> int:
    """Return a limit in bytes; a MemoryLimitError or DriverError if limits can't be enforced.

    That is checked here, because errors of a container's start are less visible.
    """
    problem = memory_limit_support.what_it_takes(vendor, inventory, config, (device,))
    if problem is not None:  # protects: dra-limit-holds
        raise problem
    request = Request(vendor.names.NAME)
    memory = vendor.memory_limiter(Grant(vendor, request, inventory, (device,)), config).memory[
        device.id
    ]
    found = size.of(memory)
    if not 0 < found <= memory:
        raise RequestError(
            f"The claim limits {vendor.names.NOUN} {device.label} to {size.text} of memory, and it "
            f"has {amount(memory)}",
            "Request at most the device's memory",
        )
    return found


def _memory_limit_mount(vendor: Vendor, device: Device, limit: int) -> dict[str, Any]:
    """Return the mount that makes the hooks limit a device; no pod or image can override it."""
    folder: str = vendor.names.MOUNTS
    if not folder:
        raise RequestError(
            f"There is no way to limit the memory of {vendor.names.TITLE}'s devices",
            "Claim the device without a limit",
        )
    names = {name for space in device.names.values() for name in space}
    name = device.id if device.id in names else device.label  # an index may change
    place = memory_limit_place(folder, name, str(limit))
    return {"hostPath": SOURCE, "containerPath": place, "options": [*MOUNT_OPTIONS]}

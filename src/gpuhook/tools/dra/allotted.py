"""What a claim was allocated of this node's devices, and what is to be done for each of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gpuhook.ground.config.model import Config
from gpuhook.ground.errors import PluginError, RequestError, shown
from gpuhook.ground.sizes import Size, amount
from gpuhook.start.contract import Grant, Vendor
from gpuhook.start.inventory.model import Device, Inventory
from gpuhook.start.request.reader import Request
from gpuhook.start.request.sources import SOURCE, limit_place
from gpuhook.tools.dra import configs, document
from gpuhook.tools.dra.devices import Devices, Known
from gpuhook.tools.dra.document import Given
from gpuhook.tools.kubernetes.dra import MEMORY
from gpuhook.tools.ledger.records import Held
from gpuhook.tools.running import limitable
from gpuhook.tools.vendors import cluster
from gpuhook.tools.vendors.quantities import bytes_of

TRY_AGAIN = "The kubelet tries again; if it goes on, delete the pod, so that it gets other devices"
_OPTIONS = ("ro", "nosuid", "nodev", "noexec", "rbind", "rprivate")

Ref = Mapping[str, str]  # namespace, name and uid of a claim


@dataclass(frozen=True)
class Allotted:
    """A device of a claim: as it is written down, in the document, and what its vendor is to do."""

    held: Held
    given: Given
    plan: Mapping[str, Any] = field(default_factory=dict)


def allotted(devices: Devices, driver: str, ref: Ref, claim: Mapping[str, Any]) -> list[Allotted]:
    """Return what a claim has of a driver; PluginError or RequestError where it can't have it."""
    allocation = _allocation(claim, ref)
    every = [each for each in allocation.get("results") or [] if each.get("driver") == driver]
    reading = _Reading(devices, driver, ref["uid"], allocation.get("config") or [])
    return [reading.one(each) for each in every]


def _allocation(claim: Mapping[str, Any], ref: Ref) -> Mapping[str, Any]:
    """Return what a claim was allocated; PluginError where that isn't said, or it is another."""
    uid = (claim.get("metadata") or {}).get("uid")
    if uid != ref["uid"]:  # protects: dra-uid
        raise PluginError(
            f"The claim {ref['namespace']}/{ref['name']} is another one by now: its uid is "
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


class _Reading:
    """One claim's allocation, being read."""

    def __init__(self, devices: Devices, driver: str, uid: str, config: list[Any]) -> None:
        self._devices = devices
        self._driver = driver
        self._uid = uid
        self._config = config
        self._known = {each.name: each for each in devices.look() if each.driver == driver}
        self._pool = devices.choices.pool or devices.choices.node
        self._names: list[str] = []  # in the document

    def one(self, result: Mapping[str, Any]) -> Allotted:
        """Return what one result gives."""
        name = shown(str(result.get("device")))
        if result.get("pool") != self._pool:  # protects: dra-pool
            raise PluginError(
                f"The claim was allocated {name} of the pool "
                f"{shown(str(result.get('pool')))}, and this node's is {self._pool}",
                "Start gpuhook dra with the --pool and --node that it published devices with",
            )
        known = self._known.get(str(result.get("device")))
        if known is None or known.device is None or known.is_lost:  # protects: dra-lost
            why = "isn't here" if known is None else "can't be reached any more"
            raise PluginError(f"The device {name} of {self._driver} {why}", TRY_AGAIN)
        failure = self._devices.failure(known)
        if failure:  # protects: dra-hangs
            raise PluginError(f"The device {known.name} can't be given now: {failure}", TRY_AGAIN)
        return self._allotted(result, known, known.device)

    def _allotted(self, result: Mapping[str, Any], known: Known, device: Device) -> Allotted:
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
                f"The claim shares {known.name} with others, and gpuhook gives a share with a "
                "limit of its memory alone",
                "Ask for some of the capacity memory, without a configuration of the vendor's",
            )
        is_admin = result.get("adminAccess") is True
        if is_admin and wish.plan:  # protects: dra-admin-changes-nothing
            raise RequestError(
                f"The claim has adminAccess to {known.name}, and a configuration that would change "
                "it for whoever else has it",
                f"Leave the request {shown(request)} out of it, or use a class that has none",
            )
        held = Held(
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
        more = {"mounts": [_limit(vendor, device, limit)]} if limit else {}
        given = Given(name, device, vendor, inventory, more, with_hook=bool(limit))
        return Allotted(held, given, wish.plan)

    def _name(self, usual: str) -> str:
        """Return a name that no device has yet: one may be there twice, once by adminAccess."""
        count = self._names.count(usual)
        self._names.append(usual)
        return f"{usual}-{count + 1}" if count else usual  # protects: dra-device-twice


def _consumed(result: Mapping[str, Any]) -> Size | None:
    """Return what of a device's memory a result has, None where it says nothing of it."""
    consumed = result.get("consumedCapacity") or {}
    texts = [text for key, text in consumed.items() if key.rpartition("/")[2] == MEMORY]
    if not texts:
        return None
    number = bytes_of(texts[0])
    if number is None:
        raise RequestError(
            f"The allocation says {shown(str(texts[0]))} of the capacity memory", TRY_AGAIN
        )
    return Size(str(texts[0]), number)


def _bytes(vendor: Vendor, inventory: Inventory, device: Device, config: Config, size: Size) -> int:
    """Return how many bytes a limit is; a LimitError or DriverError where none can hold.

    Said here, because what a container's start says is seen by fewer.
    """
    problem = limitable.what_it_takes(vendor, inventory, config, (device,))
    if problem is not None:  # protects: dra-limit-holds
        raise problem
    request = Request(vendor.names.NAME)
    memory = vendor.limiter(Grant(vendor, request, inventory, (device,)), config).memory[device.id]
    found = size.of(memory)
    if not 0 < found <= memory:
        raise RequestError(
            f"The claim limits {vendor.names.NOUN} {device.label} to {size.text} of memory, and it "
            f"has {amount(memory)}",
            "Ask for some of what the device has",
        )
    return found


def _limit(vendor: Vendor, device: Device, limit: int) -> dict[str, Any]:
    """Return the mount by which the hooks limit a device: no pod's variable or image undoes it."""
    folder: str = vendor.names.MOUNTS
    if not folder:
        raise RequestError(
            f"There is no way to limit the memory of {vendor.names.TITLE}'s devices",
            "Claim the device without a limit",
        )
    names = {name for space in device.names.values() for name in space}
    name = device.id if device.id in names else device.label  # a number may be another's later
    place = limit_place(folder, name, str(limit))
    return {"hostPath": SOURCE, "containerPath": place, "options": [*_OPTIONS]}

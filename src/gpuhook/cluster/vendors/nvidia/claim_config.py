"""Claims' configurations of NVIDIA's API group for GPUs: time slices, or MPS.

GpuConfig and MigDeviceConfig are read as by NVIDIA's own DRA driver (resource.nvidia.com/v1beta1).
For MPS, the claim gets its own control daemon, run as by ``gpuhook mps``, without a pod.
Configurations that can't be applied reliably are refused.
"""

import copy
import os
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from gpuhook.base.config.model import Config
from gpuhook.base.errors import RequestError, listed, shown
from gpuhook.base.sizes import parse_quantity
from gpuhook.core.inventory.model import Device
from gpuhook.monitor.host import driver_program
from gpuhook.monitor.mps.control import program_of
from gpuhook.monitor.mps.devices import DEFAULT, EXCLUSIVE_PROCESS
from gpuhook.monitor.mps.keep import MpsController
from gpuhook.monitor.vendors.nvidia.settings import MODE, SLICE, SLICES, check_program
from gpuhook.vendors.nvidia import mps
from gpuhook.vendors.nvidia.model import NvidiaInventory
from gpuhook.vendors.nvidia.variables import MPS_LIMITS

APIS = ("resource.nvidia.com/v1beta1",)
_KINDS = {"GpuConfig": False, "MigDeviceConfig": True}  # whether the kind is for parts
_MPS = "mps"
_THREADS, _MEMORY = "defaultActiveThreadPercentage", "defaultPinnedDeviceMemoryLimit"
_EACH, _MULTI_USER = "defaultPerDevicePinnedMemoryLimit", "multiUser"
_MEMORY_LIMITS = "limits"  # memory limits, by the claim's names in a plan, by UUID in an effect
_MEGA = 1 << 20

Plan = Mapping[str, Any]


def read(parameters: Mapping[str, Any], *, is_part: bool) -> Plan | None:
    """Return the plan for a device, {} for no change; None if the kind is for other devices.

    RequestError, in a sentence, for unknown fields and values that can't be applied.
    """
    kind = parameters.get("kind")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise RequestError(
            f"gpuhook knows no configuration of the kind {shown(str(kind))}",
            f"Use one of {', '.join(_KINDS)}",
        )
    sharing = _object(_fields(parameters, ("apiVersion", "kind", "sharing"), kind), "sharing")
    sharing = _fields(sharing, ("strategy", "timeSlicingConfig", "mpsConfig"), "sharing")
    if _KINDS[kind] != is_part:
        return None
    strategy = sharing.get("strategy", "TimeSlicing" if sharing else "")
    if not strategy:
        return {}
    if strategy == "TimeSlicing" and "mpsConfig" not in sharing:
        return _time_slice(_object(sharing, "timeSlicingConfig"), is_part=is_part)
    if strategy == "MPS" and "timeSlicingConfig" not in sharing:
        return _mps(_object(sharing, "mpsConfig"), is_part=is_part)
    raise RequestError(
        f"sharing.strategy is {shown(str(strategy))}, and sharing has {listed([*sharing])}",
        "Use TimeSlicing with timeSlicingConfig, or MPS with mpsConfig",
    )


def _time_slice(given: Mapping[str, Any], *, is_part: bool) -> Plan:
    given = _fields(given, ("interval",), "timeSlicingConfig")
    interval = given.get("interval", "Default")
    known = isinstance(interval, str) and interval in SLICES
    if not known or (is_part and given):
        raise RequestError(
            f"timeSlicingConfig.interval is {shown(str(interval))}",
            "MIG devices have no such setting" if is_part else f"Use one of {', '.join(SLICES)}",
        )
    return {} if is_part else {"do": SLICE, "slice": SLICES.index(interval)}


def _mps(given: Mapping[str, Any], *, is_part: bool) -> Plan:
    given = _fields(given, (_THREADS, _MEMORY, _EACH, _MULTI_USER), "mpsConfig")
    if is_part:
        raise RequestError("gpuhook shares no MIG device by MPS", "Claim a whole GPU for MPS")
    if given.get(_MULTI_USER, False) is not False:
        raise RequestError(
            f"mpsConfig.{_MULTI_USER} is {shown(str(given[_MULTI_USER]))}, and a claim's MPS "
            "daemon serves one user at a time",
            "Remove it, and run the claim's programs as one user",
        )
    percent = given.get(_THREADS, 0)
    if isinstance(percent, bool) or not isinstance(percent, int) or not 0 <= percent <= 100:
        raise RequestError(
            f"mpsConfig.{_THREADS} is {shown(str(percent))}", "Write a whole number from 1 to 100"
        )
    plan = {"do": _MPS, "threads": percent, "memory": 0}
    if _MEMORY in given:
        plan["memory"] = _size(given[_MEMORY], _MEMORY)
    each = _object(given, _EACH)
    if each:
        plan[_MEMORY_LIMITS] = {
            name: _size(size, f"{_EACH}[{name}]") for name, size in each.items()
        }
    return plan


def _size(text: object, name: str) -> int:
    size = parse_quantity(text)
    if size is None or size < _MEGA:
        raise RequestError(
            f"mpsConfig.{name} is {shown(str(text))}", "Write a quantity such as 8Gi, from 1Mi on"
        )
    return size


def _fields(given: Mapping[str, Any], known: Sequence[str], where: str) -> Mapping[str, Any]:
    """Return the fields without null values. RequestError for unknown fields."""
    unknown = [shown(str(each)) for each in given if each not in known]
    if unknown:  # protects: dra-unknown-fields
        raise RequestError(
            f"gpuhook knows no {listed(unknown)} in {where} of a claim's configuration",
            f"Remove it; there are {', '.join(known)}",
        )
    return {name: value for name, value in given.items() if value is not None}


def _object(given: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = given.get(key, {})
    if not isinstance(found, Mapping):
        raise RequestError(f"{key} of a claim's configuration isn't an object", "Correct it")
    return found


# Changes ------------------------------------------------------------------------------------------


def settings(plan: Plan) -> dict[str, int]:
    """Return the settings that a plan needs of its device.

    NVIDIA's DRA driver sets the compute mode for both strategies: time slices need a mode for
    several processes, and MPS one only for its clients.
    """
    if plan["do"] == _MPS:
        return {MODE: EXCLUSIVE_PROCESS}
    return {MODE: DEFAULT, SLICE: plan["slice"]}


def effects(
    config: Config, inventory: NvidiaInventory, wanted: Sequence[tuple[Device, Plan]], folder: str
) -> list[dict[str, Any]]:
    """Return the MPS daemon to start for a claim's devices, as a plain dict.

    ``folder`` is the claim's own. A GpuhookError for anything that isn't possible here, including
    time slices, before any change.
    """
    if any(plan["do"] == SLICE for _, plan in wanted):
        check_program(inventory)
    shared = [(device, plan) for device, plan in wanted if plan["do"] == _MPS]
    if not shared:
        return []
    effect = _daemon(shared, folder)
    if not driver_program.runs_here(program_of(inventory)):
        raise RequestError(
            "The driver's MPS programs don't run in this pod",
            "Run gpuhook dra on the node, as a service, for claims with MPS",
        )
    _keeper(config, inventory, effect).wanted()  # protects: dra-mps-asked
    return [effect]


def _daemon(shared: Sequence[tuple[Device, Plan]], folder: str) -> dict[str, Any]:
    """Return the effect of a claim's daemon; RequestError if its devices' plans differ."""
    if any(plan != shared[0][1] for _, plan in shared):
        raise RequestError(
            "A claim has one MPS daemon, and its configurations have different limits",
            "Give all of its GPUs the same mpsConfig, or use separate claims",
        )
    devices = [device.id for device, _ in shared]
    effect = {**shared[0][1], "devices": devices, "folder": folder}
    if _MEMORY_LIMITS in effect:
        effect[_MEMORY_LIMITS] = _by_device(effect[_MEMORY_LIMITS], devices)
    return effect


def _by_device(limits: Mapping[str, int], devices: Sequence[str]) -> dict[str, int]:
    """Return limits by UUID; a number is a device's index in the claim's sorted UUIDs."""
    places = {str(place): device for place, device in enumerate(sorted(devices))}
    unknown = [name for name in limits if name not in places and name not in devices]
    if unknown:
        raise RequestError(
            f"mpsConfig.{_EACH} has {shown(unknown[0])}, and the claim has {listed([*devices])}",
            "Use a GPU's UUID, or its index in the claim's sorted UUIDs, starting at 0",
        )
    return {places.get(name, name): size for name, size in limits.items()}


def begin(config: Config, inventory: NvidiaInventory, effect: Plan) -> dict[str, list[Any]]:
    """Start the daemon; return CDI edits for the devices. It is idempotent.

    A GpuhookError if that fails.
    """
    return _mps_edits(_keeper(config, inventory, effect).start(), effect["folder"])


def look_after(config: Config, inventory: NvidiaInventory | None, effect: Plan) -> bool:
    """Start the daemon again if it has ended by itself; tell whether it had."""
    return _keeper(config, inventory, effect).look_after()


def undo(config: Config, inventory: NvidiaInventory | None, effect: Plan) -> None:
    """Stop the daemon; a GpuhookError if that fails and has to be tried again."""
    if os.path.isdir(effect["folder"]):
        _keeper(config, inventory, effect).stop()
        shutil.rmtree(effect["folder"], ignore_errors=True)


def _keeper(config: Config, inventory: NvidiaInventory | None, effect: Plan) -> MpsController:
    """Return the controller of a claim's daemon, with the claim's limits."""
    own = copy.copy(config)
    own.state_dir = effect["folder"]
    own.mps_devices = ",".join(effect["devices"])
    own.mps_percentage = effect["threads"]
    own.mps_memory = f"{effect['memory'] // _MEGA}MiB" if effect["memory"] else ""
    own.mps_clients = 1  # all containers of a claim share one place, and its limits
    limits = effect.get(_MEMORY_LIMITS, {})
    if len({limits.get(device, effect["memory"]) for device in effect["devices"]}) > 1:
        own.mps_version = "2"  # a namespace of version 3 has one limit for all devices
    return MpsController(own, lambda _: None, limits, inventory, for_claim=True)


def _mps_edits(state: mps.MpsState, folder: str) -> dict[str, list[Any]]:
    base = f"{folder}/{mps.FOLDER}"
    options = ["nosuid", "nodev", "noexec", "rbind", "rprivate"]
    own = f"/{state.places[0]}" if state.version >= 3 else ""
    mounts = [{"hostPath": f"{base}/{mps.PIPE}{own}", "containerPath": mps.PLACE,
               "options": ["ro", *options]}]  # fmt: skip
    if state.version < 3:
        shm = "/dev/shm"  # noqa: S108 - the container's
        mounts.append({"hostPath": f"{base}/{mps.SHM}", "containerPath": shm, "options": options})
    env = [f"{mps.PIPE_VARIABLE}={mps.PLACE}"]
    if state.threads:
        env.append(f"{MPS_LIMITS[0]}={state.threads}")
    return {"env": env, "mounts": mounts}

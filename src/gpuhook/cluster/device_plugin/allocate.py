"""The response to Allocate: what a container gets for the devices that the kubelet chose.

Pure, except for the generated allocation id and for ``record``.
"""

import os
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

from gpuhook.base.errors import PluginError, RequestError, UnknownDeviceError, listed, shown
from gpuhook.base.sizes import Size, parse_size
from gpuhook.cluster.device_plugin.settings import (
    CDI_ANNOTATIONS,
    CDI_CRI,
    ENVVAR,
    MOUNTS,
    VOLUME_MOUNTS,
    Settings,
)
from gpuhook.cluster.device_plugin.state import DeviceSpec, Resource, Unit
from gpuhook.core.cdi.names import ANNOTATION_PREFIX, annotate
from gpuhook.core.request.sources import SOURCE, memory_limit_place
from gpuhook.monitor.host.child import Tell
from gpuhook.monitor.ledger.records import Records
from gpuhook.vendors.nvidia.variables import MPS_LIMITS

_PLUGIN = "nvidia-device-plugin"  # in the annotation's key: the name that engines know
_WHOLE = 100  # percent
_MEBI = 1 << 20


@dataclass(frozen=True)
class Mount:
    """A host path that is mounted in the container."""

    container: str
    host: str
    read_only: bool


@dataclass(frozen=True)
class ContainerResponse:
    """Additions of the kubelet to a container; the fields have the names of its API.

    Device nodes are readable and writable. ``cdi_devices`` are qualified names.
    """

    envs: dict[str, str] = field(default_factory=dict)
    mounts: tuple[Mount, ...] = ()
    devices: tuple[DeviceSpec, ...] = ()
    annotations: dict[str, str] = field(default_factory=dict)
    cdi_devices: tuple[str, ...] = ()


def allocate(
    resource: Resource, ids: Sequence[str], settings: Settings, allocation_id: str = ""
) -> ContainerResponse:
    """Return what a container with these devices gets; RequestError if it can't have them.

    ``ids`` are the kubelet's, and the answer keeps their order; several replicas of a device count
    as that device once. Several strategies are combined. ``allocation_id`` is unique to this
    allocation ("": generate one).
    """
    units = chosen(resource, ids)
    strategies = settings.device_list_strategy
    names = [*(unit.cdi for unit in units), *resource.cdi]
    by_mounts = VOLUME_MOUNTS in strategies
    by_variable = ENVVAR in strategies
    by_nodes = MOUNTS in strategies
    without_names = by_mounts or by_variable or by_nodes
    gives_nodes = by_nodes or (settings.pass_device_specs and without_names)
    envs = _variables(resource, units, by_variable, by_mounts, by_nodes)
    if not (by_variable or by_mounts):
        envs.update(_of_devices(units))
    if resource.shares:
        envs.update(_mps_limits(resource, ids, units))
    return ContainerResponse(
        envs=envs,
        mounts=_mounts(resource, ids, units, settings, by_mounts, by_nodes),
        devices=_nodes(units) if gives_nodes else (),
        annotations=_annotations(names, settings, allocation_id),
        cdi_devices=tuple(names) if CDI_CRI in strategies else (),
    )


def record(resource: Resource, ids: Sequence[str], state_dir: str, tell: Tell) -> None:
    """Record in the ledger that these devices are allocated, so that no claim gets them.

    If there is no ledger and it can't be made, that is only logged; RequestError if a claim has a
    device. ``state_dir`` is the ledger's folder ("": nothing is recorded).
    """
    if not state_dir:
        return
    records, offers = Records(state_dir), resource.offers()
    units = {offers[each].id: offers[each].whole for each in ids}
    try:
        records.lend(resource.vendor, resource.name, units.items())
    except PluginError as error:
        if os.path.isdir(records.folder):
            raise
        tell(str(error))


def chosen(resource: Resource, ids: Sequence[str]) -> list[Unit]:
    """Return the devices with these ids, each once; RequestError if one can't be allocated."""
    offers = resource.offers()
    unknown = [each for each in ids if each not in offers]
    if unknown:
        raise UnknownDeviceError(
            f"{resource.name} has no device {listed([shown(each) for each in unknown], 4)}",
            "Start the pod again; the kubelet may have an old list of this host's devices",
        )
    if resource.single and len(ids) > 1:
        raise RequestError(
            f"A container may have one {resource.name}, and this one asks for {len(ids)}: its "
            "devices are shared, and requesting more of them gives no larger part of a device",
            f"Ask for {resource.name}: 1, or set failRequestsGreaterThanOne to false",
        )
    units = {offers[each].id: offers[each] for each in ids}
    for unit in units.values():
        if unit.reason:
            raise RequestError(
                f"The device {unit.id} of {resource.name} can't be allocated: {unit.reason}",
                "Start the pod again; it will get another one if there is one",
            )
    return [*units.values()]


def _variables(
    resource: Resource, units: list[Unit], by_variable: bool, by_mounts: bool, by_nodes: bool
) -> dict[str, str]:
    """Return the variables; volume mounts have precedence, as in NVIDIA's plugin.

    A container that gets only nodes has the variable set to "no device". Then gpu-py and similar
    runtimes add nothing, whatever the image requests.
    """
    if not resource.variable:
        return {}
    if by_mounts:
        return {resource.variable: resource.mounts, **resource.environment}
    if by_variable:
        words = ",".join(unit.selector for unit in units)
        return {resource.variable: words or resource.nothing, **resource.environment}
    return {resource.variable: resource.nothing} if by_nodes else {}


def _of_devices(units: list[Unit]) -> dict[str, str]:
    """Return the variables that gpu-py would set: those common to all devices, values joined."""
    found: dict[str, list[str]] = {}
    for unit in units:
        for name, value in unit.variables.items():
            found.setdefault(name, []).append(value)
    return {name: ",".join(each) for name, each in found.items() if len(each) == len(units)}


def _mps_limits(resource: Resource, ids: Sequence[str], units: list[Unit]) -> dict[str, str]:
    """Return the variables that limit an MPS client; several shares of one device add up.

    The thread limit is that of the smallest share. If one share has no limit, nothing is limited.
    """
    offers = resource.offers()
    shares: dict[str, list[int]] = {}
    for each in dict.fromkeys(ids):
        shares.setdefault(offers[each].id, []).append(resource.share_of(each))
    if any(0 in each for each in shares.values()):
        return {}
    percent = {unit.id: min(sum(shares[unit.id]), _WHOLE) for unit in units}
    limits = [
        f"{place}={unit.memory * percent[unit.id] // _WHOLE // _MEBI}M"
        for place, unit in enumerate(units)
    ]
    return dict(zip(MPS_LIMITS, (str(min(percent.values())), ",".join(limits)), strict=True))


def _mounts(
    resource: Resource,
    ids: Sequence[str],
    units: list[Unit],
    settings: Settings,
    by_mounts: bool,
    by_nodes: bool,
) -> tuple[Mount, ...]:
    found = []
    if by_mounts:
        if resource.memory:
            places = _memory_limit_mounts(resource, ids, units)  # protects: plugin-memory
        else:
            places = [f"{resource.mounts}/{unit.selector}" for unit in units]
        places += [f"{resource.mounts}/{place}" for place in resource.places]
        found += [Mount(place, SOURCE, read_only=False) for place in places]
    if by_nodes and units and resource.driver_folder:
        found.append(Mount(resource.driver_folder, settings.driver_folder, read_only=True))
    return tuple(found)


def _memory_limit_mounts(resource: Resource, ids: Sequence[str], units: list[Unit]) -> list[str]:
    """Return the mounts that request devices with a limit; shares of one device add up."""
    offers = resource.offers()
    shares: dict[str, list[Size]] = {}
    for each in dict.fromkeys(ids):
        size = parse_size(resource.memory_of(each))
        if size is None:
            raise ValueError(f"{resource.memory_of(each)} isn't a size")
        shares.setdefault(offers[each].id, []).append(size)
    found = []
    for unit in units:
        total = sum(size.number for size in shares[unit.id])
        if shares[unit.id][0].percent:
            text = f"{min(total, _WHOLE)}%"
        else:
            text = str(min(total, unit.memory))
        found.append(memory_limit_place(resource.mounts, unit.selector, text, gives=True))
    return found


def _nodes(units: list[Unit]) -> tuple[DeviceSpec, ...]:
    """Return the nodes of all devices without duplicates."""
    return tuple({node.container: node for unit in units for node in unit.nodes}.values())


def _annotations(names: list[str], settings: Settings, allocation_id: str) -> dict[str, str]:
    if CDI_ANNOTATIONS not in settings.device_list_strategy or not names:
        return {}
    made = annotate({}, _PLUGIN, allocation_id or str(uuid.uuid4()), names)
    prefix = settings.cdi_annotation_prefix
    return {prefix + key.removeprefix(ANNOTATION_PREFIX): value for key, value in made.items()}

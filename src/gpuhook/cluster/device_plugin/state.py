"""The supervisor's reports to the server: resources, their devices, and the devices' health.

Plain data that converts to JSON and back without loss, one line per state.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from gpuhook.monitor.ledger.records import REPLICA


@dataclass(frozen=True)
class DeviceSpec:
    """A device node: its path on the host, and in the container."""

    host: str
    container: str


@dataclass(frozen=True)
class Unit:
    """One device that a container can get: a whole accelerator or a partition of one.

    ``id`` is the kubelet's, without a replica's number, and stable over reboots if the device has
    such an id. ``selector`` is its name in the vendor's variable and ``cdi`` its qualified CDI
    name, by UUID or index as device-id-strategy says (``cdi`` is "" if no CDI spec names it).
    ``whole`` is the id of the accelerator that it is a part of, or its own.
    ``nodes`` are all nodes that a container with only this device gets, including those common to
    the vendor's devices. ``numa`` is its NUMA node, if known. ``variables`` are those that its
    programs need if gpu-py doesn't set them. ``reason`` says in a sentence why it can't be
    allocated; "" if it can. ``memory`` is its size in bytes, if it is shared by memory.
    """

    id: str
    selector: str
    cdi: str
    whole: str
    nodes: tuple[DeviceSpec, ...] = ()
    numa: int | None = None
    reason: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)
    memory: int = 0

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """Rebuild from what ``asdict`` returned."""
        nodes = tuple(DeviceSpec(**each) for each in data["nodes"])
        return cls(**{**data, "nodes": nodes})


@dataclass(frozen=True)
class Resource:
    """A resource that pods request by name, and its devices.

    ``name`` is the cluster's (nvidia.com/gpu), ``vendor`` gpuhook's. ``variable`` is the one that
    requests devices of this vendor from gpuhook, ``mounts`` the folder below which mounts request
    them ("": the vendor has none). With ``replicas`` of 2 and more, each device is offered that
    many times, as ID::0, ID::1, ...; with ``single`` a container may request only one.
    ``environment`` is added to every container with a device. So are the CDI devices ``cdi``, if
    engines get names, and mounts at the ``places`` below ``mounts``, if mounts request devices.
    ``nothing`` is the variable's value for no device. ``driver_folder`` is where a container's
    programs look for the driver's files if none of gpuhook's runtimes adds them ("": not needed, or
    no such folder exists). ``links`` is the proximity of accelerators: for each ``whole`` the
    others with a score; higher is nearer, 0 is omitted. ``shares`` are MPS shares in percent of a
    device, by the replica's number, 0 for one without limits. ``memory`` are limits by the
    replica's number, all in percent or none, in the format of ``base.sizes``.
    """

    name: str
    vendor: str
    variable: str
    mounts: str
    units: tuple[Unit, ...]
    replicas: int = 1
    single: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    links: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    cdi: tuple[str, ...] = ()
    places: tuple[str, ...] = ()
    nothing: str = "void"
    driver_folder: str = ""
    shares: tuple[int, ...] = ()
    memory: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """Rebuild from what ``asdict`` returned."""
        units = tuple(map(Unit.from_json, data["units"]))
        names = {name: tuple(data[name]) for name in ("cdi", "places", "shares", "memory")}
        return cls(**{**data, "units": units, **names})

    def offers(self) -> dict[str, Unit]:
        """Return the ids that the kubelet may allocate, each with its device."""
        if self.replicas < 2:
            return {unit.id: unit for unit in self.units}
        numbers = range(self.replicas)  # what ``_replica`` reads
        return {f"{unit.id}{REPLICA}{n}": unit for unit in self.units for n in numbers}

    def share_of(self, identity: str) -> int:
        """Return the share of one of the kubelet's ids, in percent; 0 means no limit."""
        return self.shares[_replica(identity)]

    def memory_of(self, identity: str) -> str:
        """Return the memory limit of one of the kubelet's ids."""
        return self.memory[_replica(identity)]


def _replica(identity: str) -> int:
    return int(identity.rpartition(REPLICA)[2])


@dataclass(frozen=True)
class PluginState:
    """All resources of this host, in the order in which they are registered."""

    resources: tuple[Resource, ...] = ()

    def to_line(self) -> bytes:
        """Return it as one line of JSON."""
        return json.dumps(asdict(self), separators=(",", ":")).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Self:
        """Rebuild from what ``to_line`` returned."""
        return cls(tuple(map(Resource.from_json, json.loads(line)["resources"])))

"""What the supervisor reports to the server: resources, their devices, and how those are.

Plain data that goes to JSON and back without loss, one line per state.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

REPLICA = "::"  # between a device's id and a replica's number, in the kubelet's ids


@dataclass(frozen=True)
class Node:
    """A device node: its path on the host, and in the container."""

    host: str
    container: str


@dataclass(frozen=True)
class Unit:
    """One device that a container can be given: a whole accelerator or a part of one.

    ``id`` is the kubelet's, without a replica's number: the same after a reboot, where there is
    such. ``selector`` is what the vendor's variable calls it and ``cdi`` its qualified CDI name, by
    UUID or index as device-id-strategy has it (``cdi`` is "" for what no document names). ``whole``
    is the id of the accelerator that it is a part of, its own where it is none.
    ``nodes`` are all that a container with it alone gets, those of every device of the vendor
    among them. ``numa`` is the node of memory that it is near to, if one is known, and
    ``variables`` what its programs need where gpu-py doesn't set it. ``reason``
    says why it can't be given, in a sentence; "" where it can. ``memory`` is what it has in bytes,
    where that is shared.
    """

    id: str
    selector: str
    cdi: str
    whole: str
    nodes: tuple[Node, ...] = ()
    numa: int | None = None
    reason: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)
    memory: int = 0

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """Rebuild from what ``asdict`` returned."""
        nodes = tuple(Node(**each) for each in data["nodes"])
        return cls(**{**data, "nodes": nodes})


@dataclass(frozen=True)
class Resource:
    """What a pod asks for by one name, and the devices that serve it.

    ``name`` is the cluster's (nvidia.com/gpu), ``vendor`` ours. ``variable`` is the one that asks
    gpuhook for devices of this vendor, ``mounts`` the folder below which mounts ask for them ("":
    the vendor has none). With ``replicas`` of 2 and more, each device is offered that many times,
    as ID::0, ID::1, ...; with ``single`` a container may ask for one only. ``environment`` goes
    into every container with a device, and so do the CDI devices ``cdi`` where engines are given
    names, and mounts at the ``places`` below ``mounts`` where mounts ask. ``nothing`` is the
    variable's word for no device. ``driver_folder`` is where a container's programs look for the
    driver's files where no runtime of ours puts them in ("": it needs none, or there is no such
    place). ``links`` says how near two accelerators are: for the ``whole`` of each, that of the
    others with a score, more is nearer, 0 is not said. ``shares`` are those of MPS in percent of a
    device, by the replica's number, 0 for one without limits. ``memory`` are limits by the
    replica's number, all in percent or none, as ``ground.sizes`` has them.
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
        """Return what the kubelet may give away: its ids, each with its device."""
        if self.replicas < 2:
            return {unit.id: unit for unit in self.units}
        numbers = range(self.replicas)  # what ``_replica`` reads
        return {f"{unit.id}{REPLICA}{n}": unit for unit in self.units for n in numbers}

    def share_of(self, identity: str) -> int:
        """Return the share of one of the kubelet's ids, in percent; 0 has no limit."""
        return self.shares[_replica(identity)]

    def memory_of(self, identity: str) -> str:
        """Return the limit of memory of one of the kubelet's ids."""
        return self.memory[_replica(identity)]


def _replica(identity: str) -> int:
    return int(identity.rpartition(REPLICA)[2])


@dataclass(frozen=True)
class State:
    """All resources of this machine, in the order in which they are registered."""

    resources: tuple[Resource, ...] = ()

    def to_line(self) -> bytes:
        """Return it as one line of JSON."""
        return json.dumps(asdict(self), separators=(",", ":")).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Self:
        """Rebuild from what ``to_line`` returned."""
        return cls(tuple(map(Resource.from_json, json.loads(line)["resources"])))

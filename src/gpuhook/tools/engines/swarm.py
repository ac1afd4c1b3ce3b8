"""Docker Swarm: the devices of a node by name, in daemon.json's node-generic-resources.

The scheduler gives a service whole names, no name to two tasks at once, and says which in the
variable DOCKER_RESOURCE_<KIND> of the container. An entry is KIND=NAME, or KIND=NUMBER for what
is only counted. Source: dockerd(8), "Node Generic Resources"; swarmkit, api/genericresource.
"""

from collections.abc import Iterable
from dataclasses import dataclass

KEY = "node-generic-resources"
_VARIABLE = "DOCKER_RESOURCE_"
_SHORTEST = 4  # characters that all names may have in common: GPU-


@dataclass(frozen=True)
class Resource:
    """A device as a node is to offer it: its vendor's name here, and KIND=NAME."""

    vendor: str
    kind: str
    name: str


class Node:
    """What daemon.json says of a node (``entries``), held against the devices it has."""

    def __init__(self, entries: Iterable[str], devices: Iterable[Resource]) -> None:
        self.entries = list(dict.fromkeys(entries))
        self.devices = list(dict.fromkeys(devices))
        self._of = {entry: self._device(entry.partition("=")[2].strip()) for entry in self.entries}

    def merged(self) -> list[str]:
        """Return the entries with one for each device.

        An entry of a device stays, whatever its kind: with two of them the scheduler would give
        the device away twice. Entries of the devices' kinds that name something else, which isn't
        here any more, go; all others stay.
        """
        kinds = {device: self._kind(device) for device in self.devices}
        ours = set(kinds.values())
        found = [
            entry
            for entry in self.entries
            if self._of[entry] or _kind(entry) not in ours or _is_count(entry)
        ]
        missing = [device for device in self.devices if device not in self._of.values()]
        return found + [f"{kinds[device]}={device.name}" for device in missing]

    def variables(self) -> dict[str, list[str]]:
        """Return the variables that say which devices a container has, and whose devices."""
        found: dict[str, list[str]] = {}
        for entry, device in self._of.items():
            if device is not None:
                vendors = found.setdefault(_VARIABLE + _kind(entry).upper(), [])
                vendors += [device.vendor] if device.vendor not in vendors else []
        return found

    def _device(self, name: str) -> Resource | None:
        """Return the device that a name means: its own, or the beginning that it alone has."""
        begins = [each for each in self.devices if each.name.lower().startswith(name.lower())]
        exact = [each for each in begins if each.name == name]
        return (
            (exact or begins)[0] if len(name) > _SHORTEST and (exact or len(begins) == 1) else None
        )

    def _kind(self, device: Resource) -> str:
        """Return the kind of a device without an entry: that of others of its sort, else ours."""
        for entry, other in self._of.items():
            if other and (other.vendor, other.kind) == (device.vendor, device.kind):
                return _kind(entry)
        return device.kind


def _kind(entry: str) -> str:
    return entry.partition("=")[0].strip()


def _is_count(entry: str) -> bool:
    return entry.partition("=")[2].strip().isdecimal()

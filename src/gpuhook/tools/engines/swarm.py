"""Docker Swarm: named devices of a node, in daemon.json's node-generic-resources.

The scheduler assigns names to a service, each name to one task at a time, and sets them in the
container's variable DOCKER_RESOURCE_<KIND>. An entry is KIND=NAME, or KIND=NUMBER for counted
resources. Source: dockerd(8), "Node Generic Resources"; swarmkit, api/genericresource.
"""

from collections.abc import Iterable
from dataclasses import dataclass

KEY = "node-generic-resources"
_VARIABLE = "DOCKER_RESOURCE_"
_SHORTEST = 4  # length of the prefix that all names may share: GPU-


@dataclass(frozen=True)
class SwarmResource:
    """A device that a node offers: its vendor's name in gpuhook, and KIND=NAME."""

    vendor: str
    kind: str
    name: str


class SwarmNode:
    """Comparison of a node's entries in daemon.json with its devices."""

    def __init__(self, entries: Iterable[str], devices: Iterable[SwarmResource]) -> None:
        self.entries = list(dict.fromkeys(entries))
        self.devices = list(dict.fromkeys(devices))
        self._of = {entry: self._device(entry.partition("=")[2].strip()) for entry in self.entries}

    def merged(self) -> list[str]:
        """Return the entries, completed to one per device.

        An entry of a device is kept, whatever its kind: with two entries the scheduler would
        assign the device twice. Entries of the devices' kinds for devices that no longer exist
        are removed. All others are kept.
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
        """Return the variables that name a container's devices, with the devices' vendors."""
        found: dict[str, list[str]] = {}
        for entry, device in self._of.items():
            if device is not None:
                vendors = found.setdefault(_VARIABLE + _kind(entry).upper(), [])
                vendors += [device.vendor] if device.vendor not in vendors else []
        return found

    def _device(self, name: str) -> SwarmResource | None:
        """Return the device with a name or a unique prefix."""
        begins = [each for each in self.devices if each.name.lower().startswith(name.lower())]
        exact = [each for each in begins if each.name == name]
        return (
            (exact or begins)[0] if len(name) > _SHORTEST and (exact or len(begins) == 1) else None
        )

    def _kind(self, device: SwarmResource) -> str:
        """Return the kind for a device without an entry: that of similar devices, else ours."""
        for entry, other in self._of.items():
            if other and (other.vendor, other.kind) == (device.vendor, device.kind):
                return _kind(entry)
        return device.kind


def _kind(entry: str) -> str:
    return entry.partition("=")[0].strip()


def _is_count(entry: str) -> bool:
    return entry.partition("=")[2].strip().isdecimal()

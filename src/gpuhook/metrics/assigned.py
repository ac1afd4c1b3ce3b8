"""Devices of each container: by gpuhook's records, else by the container's device nodes."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gpuhook.base.config.model import Config
from gpuhook.core.inventory.model import Inventory
from gpuhook.core.records import records
from gpuhook.metrics.containers import owner_of
from gpuhook.metrics.processes import started
from gpuhook.monitor.containers import device_users, groups
from gpuhook.monitor.containers.nodes import Numbers
from gpuhook.tools.running import docker_inspect

_PAUSE = 15.0  # minimum seconds between two scans for containers without a record
_SHARE = 100  # such scans may take one part in this many of the time


@dataclass(frozen=True)
class ContainerCgroup:
    """A container, its first process's own cgroup ("" for none) and its engine's folder."""

    container: device_users.RunningContainer
    group: str
    pod_uid: str
    image: str
    bundle: str
    devices: tuple[str, ...]
    slurm_job: str


class Holders:
    """The running containers that have devices."""

    def __init__(self, config: Config, clock: Callable[[], float]) -> None:
        self._config = config
        self._state_dir = config.state_dir
        self._clock = clock
        self._others: list[
            tuple[device_users.RunningContainer, str]
        ] = []  # with its process's start time
        self.problems: tuple[str, ...] = ()  # sentences about gaps of the last scan
        self._again = 0.0
        self._places: dict[tuple[int, str], tuple[str, str, str]] = {}

    def look_around(self, inventories: Iterable[Inventory]) -> None:
        """Scan for containers without a record, unless that was just done: it takes a while."""
        before = self._clock()
        if before < self._again:
            return
        inventories = list(inventories)
        seen = device_users.running(inventories, self._state_dir)
        found = device_users.without_record(seen.containers)
        found += docker_inspect.asked(self._config, inventories, seen.containers)
        self._others = [(each, started(each.pid)) for each in found]
        self.problems = seen.problems
        took = self._clock() - before
        self._again = before + max(_PAUSE, _SHARE * took)

    def forget(self) -> None:
        """Force a scan the next time."""
        self._again = 0.0

    def find(self, inventories: Iterable[Inventory], *, scan_first: bool) -> list[ContainerCgroup]:
        """Return the containers: current ones with a record, and others as of the last scan.

        With ``scan_first``, and the first time, a due scan for the others is done before.
        """
        inventories = list(inventories)
        if scan_first or not self._again:
            self.look_around(inventories)
        recorded = [
            (device_users.of_record(each), str(each["started"]))
            for each in records.read_all(self._state_dir)
        ]
        names = {each.name for each, _ in recorded}
        others = [
            (each, began)
            for each, began in self._others
            if began == started(each.pid) != "" and each.name not in names  # else it is an impostor
        ]
        places, self._places = self._places, {}
        given = DeviceAssignments(inventories)
        return [self._holder(*each, given, places) for each in (*recorded, *others)]

    def _holder(
        self,
        container: device_users.RunningContainer,
        began: str,
        given: "DeviceAssignments",
        places: Mapping[tuple[int, str], tuple[str, str, str]],
    ) -> ContainerCgroup:
        record = container.record or {}
        key = (container.pid, began)
        place = places.get(key)
        if place is None:
            mine, ours = groups.groups_of(container.pid), groups.groups_of("self")
            made = groups.RootCgroups().of(mine)
            # For a user with a delegated cgroup, everything below it counts as one.
            path = (
                groups.path_of(container.cgroups, mine, ours)
                if container.record
                else groups.own_path(made, ours)
            )
            owner = owner_of(made)
            place = ("" if path == "/" else path, owner.pod_uid, owner.job)
        self._places[key] = place
        return ContainerCgroup(
            container,
            place[0],
            record.get("uid") or place[1],
            record.get("image", ""),
            record.get("bundle", ""),
            given.to(container),
            place[2],
        )


class DeviceAssignments:
    """The devices of containers, counting only devices that a container has completely."""

    def __init__(self, inventories: Iterable[Inventory]) -> None:
        self._inventories = [(each, device_users.whole_nodes(each)) for each in inventories]

    def to(self, container: device_users.RunningContainer) -> tuple[str, ...]:
        """Return the ids of a container's devices, in the order of the inventories."""
        return tuple(name for each in self._inventories for name in self._of(container, *each))

    def _of(
        self,
        container: device_users.RunningContainer,
        inventory: Inventory,
        nodes: Mapping[str, set[Numbers]],
    ) -> list[str]:
        selected = _selected(container.record or {}, inventory.vendor)
        if selected:
            return [device.id for device in inventory.devices if device.id in selected]
        has = container.nodes
        held = [each for each in inventory.devices if each.id in nodes and nodes[each.id] <= has]
        whole = {device.parent for device in held}
        return [device.id for device in held if device.id not in whole]


def _selected(record: Mapping[str, Any], vendor: str) -> set[str]:
    given = record.get("given", ())
    ours = [each for each in given if each.get("vendor") == vendor]
    return {name for each in ours for name in each.get("selected", ())}

"""Snapshots of all devices and containers: the drivers' values, and the owners of processes."""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from gpuhook.base.config.model import Config
from gpuhook.core.inventory.model import Inventory
from gpuhook.core.inventory.selection import fallen_off
from gpuhook.metrics import pods, vendor_parts
from gpuhook.metrics.assigned import ContainerCgroup, Holders
from gpuhook.metrics.host_use import HostUse
from gpuhook.metrics.inventories import Inventories
from gpuhook.metrics.model import Accelerator, Container, DeviceProcess, Snapshot, Usage
from gpuhook.metrics.processes import Processes, find, poses, sees_all_processes, user_of
from gpuhook.monitor import kubelet
from gpuhook.monitor.containers import memory
from gpuhook.monitor.containers.device_users import MAX_CONTAINERS, WITHOUT_ROOT, command_of
from gpuhook.monitor.containers.groups import SLURM
from gpuhook.monitor.machine import HostDevices
from gpuhook.monitor.telemetry import PATIENCE, FileTelemetry, TelemetryWorker
from gpuhook.tools.running.names import Names

_OTHER_NAMESPACE = (
    "This runs in a separate pid namespace, where the processes of containers can't be told "
    "apart; start it in the host's (--pid host, hostPID: true)"
)

_NO_MPS = "The control daemon of MPS isn't running: containers with shared GPUs fail"
_MANY = (
    f"Processes of more than {MAX_CONTAINERS} containers without a record use devices: those "
    "of the others are counted as processes outside of containers"
)

_LEAST = 0.5  # minimum seconds for querying a driver's limits, whatever the earlier steps took

Values = Mapping[str, Mapping[str, Any]]
Clock = Callable[[], float]


class Observer:
    """A producer of snapshots; its process must have only one thread, because it forks.

    ``readings`` queries further values from drivers, ``each`` includes every process. With
    ``prepared`` the caller calls ``prepare`` between snapshots. ``patience`` is how many seconds a
    driver may take to answer; its inventory gets half of that, the kubelet a quarter.
    ``pod_resources`` is the kubelet's socket. ``tell`` gets a sentence for each change.
    Between snapshots a child may hold a driver open, until ``let_go``.
    """

    def __init__(
        self,
        config: Config,
        *,
        readings: bool = False,
        each: bool = False,
        prepared: bool = False,
        patience: float = PATIENCE,
        pod_resources: str = kubelet.SOCKET,
        tell: Callable[[str], None] = lambda _: None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._config = config
        self._readings = readings
        self._each: list[DeviceProcess] | None = [] if each else None
        self._prepared = prepared
        self._clock = clock
        self._patience = patience
        self._inventories = Inventories(clock)
        self._machine = HostDevices(
            config, tell, clock, follow=self._inventories.follow, linked=False
        )
        self._telemetry: dict[str, TelemetryWorker | None] = {}
        self._place = kubelet.KubeletSocket(pod_resources)
        self._kubelet = TelemetryWorker(
            kubelet, "Kubernetes", config, clock, patience / 4, "kubelet"
        )
        self._holders = Holders(config, clock)
        self._processes = Processes()
        self._host_use = HostUse()
        self._names = Names(clock)
        self._room, self._left_out = MAX_CONTAINERS, False  # for containers known only by use
        self._errors: Counter[str] = Counter()
        self._durations: dict[str, float] = {}

    def take(self) -> Snapshot:
        """Return a snapshot; values that aren't available in time are absent, counted as errors."""
        problems = [] if sees_all_processes() else [_OTHER_NAMESPACE]
        problems += [WITHOUT_ROOT.rstrip(".")] if os.geteuid() else []
        with self._timed("inventory"):
            self._look(self._patience / 2)
            found = self._machine.found
            problems += self._inventories.problems()
            problems += [
                fallen_off(inventory.lost, vendor.names)
                for vendor, inventory in found
                if inventory.lost
            ]
            failures = self._machine.failures()
            for failure in failures.values():
                problems.append(str(failure))
                self._errors["inventory"] += 1
            is_up = self._is_mps_up()
            problems += [_NO_MPS] if is_up is False else []
        with self._timed("driver"):
            answers = [self._ask(*each, problems) for each in found]
        with self._timed("containers"):
            inventories = [inventory for _, inventory in found]
            holders = self._holders.find(inventories, scan_first=not self._prepared)
            values = {key: value for answer in answers for key, value in answer.items()}
            problems += self._holders.problems
            containers, usages = self._assemble(holders, values, problems)
        with self._timed("kubelet"):
            containers = self._name_pods(containers, found, values, problems)
        devices = [device for each in found for device in self._devices(*each, values)]
        return Snapshot(
            tuple(devices),
            tuple(containers),
            tuple(usages),
            {vendor.names.NAME: inventory.version for vendor, inventory in found},
            self._all_errors(),
            dict(self._durations),
            tuple(problems),
            tuple(each.note for each in self._telemetry.values() if each and each.note),
            tuple(self._each or ()),
            is_up,
        )

    def _is_mps_up(self) -> bool | None:
        """Tell whether the MPS control daemon runs; None if no device is shared by MPS."""
        if not self._config.mps_devices:
            return None
        from gpuhook.vendors.nvidia import mps  # noqa: PLC0415 - few share devices by MPS

        state = mps.read(self._config.state_dir)
        return state is not None and mps.lives(state)

    def prepare(self, patience: float = 0.0) -> None:
        """Do the slow work of a snapshot, if due; with ``prepared`` the caller must call it."""
        self._look(patience)
        if patience:
            self._kubelet.ask(self._place)  # starts its query process
        if self._machine.found:
            self._holders.look_around(inventory for _, inventory in self._machine.found)

    def _look(self, patience: float) -> None:
        self._inventories.wait_for(patience)
        if self._machine.refresh():
            self._holders.forget()  # others may have devices now

    def let_go(self, seconds: float = 0.0) -> None:
        """Close all drivers for at least ``seconds``; a later snapshot opens them again."""
        self._inventories.let_go(seconds)
        self._kubelet.let_go()
        for each in self._telemetry.values():
            if each is not None:
                each.let_go(seconds)

    @contextmanager
    def _timed(self, step: str) -> Iterator[None]:
        before = self._clock()
        yield
        self._durations[step] = self._clock() - before

    def _all_errors(self) -> dict[str, int]:
        """Return the number of errors of each kind, including kinds without errors."""
        found = Counter({"inventory": 0, "starting": 0, "timeout": 0, "ended": 0, "failed": 0})
        found.update({"device": 0, **self._errors})
        for each in self._telemetry.values():
            if each is not None:
                found.update(each.errors)
        found["kubelet"] = self._kubelet.errors.total()
        found["starting"] += self._kubelet.errors["starting"]
        return dict(found)

    # Devices --------------------------------------------------------------------------------

    def _ask(self, vendor: Any, inventory: Any, problems: list[str]) -> dict[str, Any]:
        """Return the current values of each device from a vendor's driver."""
        names = vendor.names
        if names.NAME not in self._telemetry:
            self._telemetry[names.NAME] = self._asking(names)
        telemetry = self._telemetry[names.NAME]
        if telemetry is None:
            return {}
        answer = telemetry.ask(inventory, more=self._readings)
        if telemetry.problem:
            problems.append(telemetry.problem)
        found = telemetry.facts(inventory)
        for device, values in (answer or {}).get("devices", {}).items():
            found.setdefault(device, {}).update(telemetry.worded(values))
        return found

    def _asking(self, names: Any) -> TelemetryWorker | None:
        """Return the telemetry of a vendor's driver, None if it has none; files have less time."""
        module: Any = vendor_parts.telemetry(names)
        if module is None:
            return None
        reads = hasattr(module, "read")
        patience = self._patience / 2 if reads else self._patience
        asked = FileTelemetry(module) if reads else module
        return TelemetryWorker(asked, names.TITLE, self._config, self._clock, patience)

    def _devices(self, vendor: Any, inventory: Inventory, values: Values) -> Iterator[Accelerator]:
        telemetry = self._telemetry.get(vendor.names.NAME)
        fields = set(Accelerator.__dataclass_fields__)
        for each in inventory.devices:
            node = inventory.node(each.nodes[0]) if each.nodes and not each.parent else None
            said = {"minor": node and node.minor, **values.get(each.id, {})}
            yield Accelerator(
                vendor=vendor.names.NAME,
                id=each.id,
                label=each.label,
                bus_id=each.bus_id,
                model=each.model,
                parent=each.parent,
                xids=telemetry.xids_of(each.id) if telemetry else {},
                **{name: value for name, value in said.items() if name in fields},
            )

    # Containers -----------------------------------------------------------------------------

    def _assemble(
        self, holders: list[ContainerCgroup], values: Values, problems: list[str]
    ) -> tuple[list[Container], list[Usage]]:
        """Return the containers, and their usage of each device."""
        self._room, self._left_out = MAX_CONTAINERS, False
        if self._each is not None:
            self._each = []
        groups = {each.group: each.container.name for each in holders if each.group}
        known: dict[str, Container] = {}
        for holder in holders:
            made = self._container(holder)
            before = known.setdefault(made.id, made)
            # Containers with the same id, such as runc's in several roots, count as one.
            devices = tuple(dict.fromkeys([*before.devices, *made.devices]))
            known[made.id] = replace(before, devices=devices)  # protects: same-id
        used: dict[tuple[str, str], Usage] = {}
        for device, said in values.items():
            for usage in self._usages(device, said, groups, known):
                used[usage.container, device] = usage
        self._processes.forget()
        self._host_use.end_sample()
        if self._left_out:
            problems.append(_MANY)
        for each in known.values():
            for device in each.devices:
                said = values.get(device, {})
                if "processes" in said and (each.id, device) not in used:
                    sm = 0.0 if "sm" in said else None
                    used[each.id, device] = Usage(each.id, device, 0, sm, 0)
        self._use_cgroups(holders, used, problems)
        self._ask_names(holders, known)
        named = [self._named(each) for each in known.values()]
        return named, [*used.values()]

    def _use_cgroups(
        self,
        holders: list[ContainerCgroup],
        used: dict[tuple[str, str], Usage],
        problems: list[str],
    ) -> None:
        """Replace the memory usage of containers' processes by that of their cgroups."""
        inventories = [inventory for _, inventory in self._machine.found]
        containers = [each.container for each in holders]
        # A driver that hangs has used most of it up.
        left = max(self._patience - self._durations.get("driver", 0.0), _LEAST)
        found, unknown = memory.look(containers, inventories, self._config, left)
        problems += [unknown] if unknown else []
        for (container, device), said in found.items():
            before = used.get((container, device), Usage(container, device))
            used[container, device] = replace(
                before,
                memory_bytes=said.used,
                memory_limit_bytes=said.limit,
                memory_source=said.source,
            )

    def _usages(
        self,
        device: str,
        said: Mapping[str, Any],
        groups: Mapping[str, str],
        known: dict[str, Container],
    ) -> Iterator[Usage]:
        """Yield each container's usage of a device; adds unknown containers to ``known``."""
        bytes_of: dict[str, int | None] = {}
        share: dict[str, float] = {}
        count: Counter[str] = Counter()
        for pid, used in said.get("processes", ()):
            container = self._container_of(pid, groups, known)
            count[container] += 1
            before = bytes_of.get(container, 0)
            bytes_of[container] = None if used is None or before is None else before + used
            if self._each is not None:
                sm = said["sm"].get(str(pid), 0.0) if "sm" in said else None
                about = user_of(pid), command_of(pid)
                made = DeviceProcess(pid, device, container, *about, used, sm)
                host = self._host_use.of(pid)
                made = replace(
                    made,
                    cpu_seconds=host.cpu_seconds,
                    cpu_utilization=host.cpu_utilization,
                    host_memory_bytes=host.memory_bytes,
                )
                self._each.append(made)
        for pid, part_of in said.get("sm", {}).items():
            container = self._container_of(int(pid), groups, known)
            share[container] = share.get(container, 0.0) + part_of
        none = 0 if "processes" in said else None  # else the number of processes is unknown
        for container in {**bytes_of, **share}:
            sm = share.get(container, 0.0) if "sm" in said else None
            processes = count.get(container, none)
            yield Usage(container, device, bytes_of.get(container, none), sm, processes)

    def _container_of(
        self, pid: int, groups: Mapping[str, str], known: dict[str, Container]
    ) -> str:
        group, owner = self._processes.place(pid)
        found = find(group, groups)
        is_job = owner.engine == SLURM  # its name isn't in a cgroup's name
        if not found and owner.id and (is_job or not poses(group, owner.id, groups)):
            found = owner.id
            if found not in known and not self._room:
                self._left_out = True
                return ""
            if found not in known:
                self._room -= 1
                known[found] = Container(
                    found, owner.engine, pod_uid=owner.pod_uid, slurm_job=owner.job
                )
        return found

    def _container(self, holder: ContainerCgroup) -> Container:
        each = holder.container
        words = {"pod": each.pod, "namespace": each.namespace, "container": each.container}
        return Container(
            id=each.name,
            engine=each.engine,
            pod_uid=holder.pod_uid,
            image=holder.image,
            devices=holder.devices,
            slurm_job=holder.slurm_job,
            **words,
        )

    def _name_pods(
        self,
        containers: list[Container],
        found: list[Any],
        values: Values,
        problems: list[str],
    ) -> list[Container]:
        """Return the containers, with names of pods from the kubelet where they are missing."""
        answer = self._kubelet.ask(self._place)
        if self._kubelet.problem and any(each.pod_uid and not each.pod for each in containers):
            problems.append(self._kubelet.problem)
        if not answer or not answer.get("pods"):
            return containers
        known = [(vendor.names.KIND, inventory, values) for vendor, inventory in found]
        return pods.name(containers, pods.read(answer["pods"], known))

    def _ask_names(self, holders: list[ContainerCgroup], known: Mapping[str, Container]) -> None:
        bundles = {each.container.name: each.bundle for each in holders}
        self._names.ask(
            [(each.engine, each.id, bundles.get(each.id, "")) for each in known.values()]
        )

    def _named(self, container: Container) -> Container:
        name, image = self._names.of(container.id)
        changes = {"name": name or container.name, "image": container.image or image}
        return Container(**{**vars(container), **changes})

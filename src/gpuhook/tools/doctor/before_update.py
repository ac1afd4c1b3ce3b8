"""Report before an update of the driver: who uses it, what restarts them, and what gets stale."""

import os
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from gpuhook.base import names
from gpuhook.base.errors import NoDriverError, listed, printable
from gpuhook.base.host import proc
from gpuhook.core.inventory import cache
from gpuhook.core.inventory.model import Inventory
from gpuhook.monitor.containers import device_users, open_nodes
from gpuhook.monitor.containers.device_users import WITHOUT_ROOT, RunningContainer
from gpuhook.monitor.containers.groups import SLURM, RootCgroups, groups_of, identify, own_path
from gpuhook.monitor.containers.open_nodes import NodeUser
from gpuhook.monitor.host.namespaces import NamespaceScan, mounts_of
from gpuhook.monitor.vendors import survey
from gpuhook.tools.doctor import cdi
from gpuhook.tools.doctor.case import Case, CheckStep
from gpuhook.tools.doctor.engine_files import output
from gpuhook.tools.doctor.finding import Finding, failure, note, ok, warning
from gpuhook.tools.engines import docker_api
from gpuhook.tools.running.names import of_docker, of_podman

_PATIENCE = 10.0  # seconds to search all processes
_ENGINE = 2.0  # seconds for an engine's answer
_SHOWN = 6
_PODS = ("kubernetes", "cri-o")
_UNIT = re.compile(r"/system\.slice/(?:[^/]+/)*?([^/]+\.service)(?:/|$)")


class DriverUser(NamedTuple):
    """A container, a unit or a process, with the processes that have the driver open.

    ``restarts`` names what restarts it, with the policy: "kubelet", "docker: always",
    "systemd: on-failure"; "no" for nothing, "" if that is unknown. ``remedy`` ends it.
    """

    name: str
    id: str
    engine: str
    processes: list[NodeUser]
    restarts: str
    remedy: str

    def to_json(self) -> dict[str, Any]:
        """Return an entry of "holders" in the JSON output."""
        found = self._asdict() | {"processes": [each._asdict() for each in self.processes]}
        return found | {"restarts": self.restarts or None}


class BeforeUpdate:
    """The checks of `gpuhook doctor --before-update`; ``holders`` is their result for programs."""

    def __init__(self) -> None:
        self._inventories: list[Inventory] = []
        self.holders: list[DriverUser] = []

    def steps(self) -> tuple[CheckStep, ...]:
        """Return the checks in their order."""
        return (
            CheckStep(self.driver_in_use),
            CheckStep(self.stale_spec),
            CheckStep(self.stale_mount),
        )

    def driver_in_use(self, case: Case) -> Iterator[Finding]:
        """Report containers and processes that use the driver, and what restarts them."""
        config = case.config
        try:
            found, failed = survey.present(config, lambda each: cache.get_inventory(config, each))
        except NoDriverError:
            found, failed = [], []
        self._inventories = found
        for error in failed:
            yield warning("driver-in-use", error.cause, error.remedy)
        look = NamespaceScan(_PATIENCE)
        nodes = {node.numbers: node.path for each in found for node in each.nodes}
        running = device_users.running(found, config.state_dir)
        self.holders = _holders(case, running.containers, open_nodes.users(nodes, look))
        for sentence in running.problems:
            yield warning("driver-in-use", sentence, "Check these processes yourself")
        if os.geteuid() or not look.is_whole:
            why = (
                WITHOUT_ROOT.rstrip(".") if os.geteuid() else "There was no time for all processes"
            )
            yield warning("driver-in-use", why, "Run this as root, on a host with less load")
        for holder in self.holders:
            yield _finding(holder)
        if not self.holders:
            drivers = listed([f"{each.vendor} {each.version}".strip() for each in found])
            yield ok("driver-in-use", f"No process uses a driver ({drivers or 'none found'})")

    def stale_spec(self, case: Case) -> Iterator[Finding]:
        """Report CDI specs with files of the present driver."""
        ours = {
            each.root.rstrip("/") + file.path for each in self._inventories for file in each.files
        }
        for path, named in cdi.host_paths(case).items():
            count = len(ours.intersection(named))
            remedy = cdi.remake(case, path)
            if count:
                text = f"{path} names {count} files of the present driver"
                made = note if remedy != cdi.REMAKE else warning
                yield made("stale-spec", text, f"After the update: {remedy}")

    def stale_mount(self, case: Case) -> Iterator[Finding]:
        """Report root folders on this host in which files of the present driver are mounted."""
        versioned = {
            os.path.basename(file.path)
            for each in self._inventories
            for file in each.files
            if each.version and each.version in file.path
        }
        roots = {each.root.rstrip("/") + "/" for each in self._inventories if each.root != "/"}
        points = [
            proc.unescaped(mount.point)
            for mount in proc.Mounts(case.machine.data("/proc/self/mountinfo"))
            if os.path.basename(proc.unescaped(mount.root)) in versioned
        ]
        points = [each for each in points if not each.startswith(tuple(roots))]
        if points:
            yield warning(
                "stale-mount",
                f"{len(points)} files of the present driver are mounted on this host, such as "
                f"{printable(points[0])}",
                "After the update, run gpuhook apply again for each root folder",
            )


def _holders(
    case: Case, containers: Iterable[RunningContainer], processes: Iterable[NodeUser]
) -> list[DriverUser]:
    """Return containers with devices, and everything that has the driver open."""
    containers = device_users.believed([*containers])
    by_mounts = {mounts_of(each.pid): each for each in containers}
    by_name = {each.name: each for each in containers}
    grouped: dict[str, list[NodeUser]] = {each.name: [] for each in containers}
    known: dict[str, tuple[str, str]] = {}  # each one's engine and unit
    made, ours = RootCgroups(), groups_of("self")
    for process in processes:
        groups = groups_of(process.pid)
        identity = identify(made.of(groups), ours)
        holder = by_mounts.get(mounts_of(process.pid)) or by_name.get(identity.name)
        match = _UNIT.search(own_path(groups, {}))
        unit = match[1] if match else ""
        key = holder.name if holder else identity.name if identity.engine else unit
        key = key or f"process {process.pid}"
        known[key] = (identity.engine, unit)
        grouped.setdefault(key, []).append(process)
    sockets = docker_api.sockets(case.machine.processes("dockerd"))
    called = {"docker": of_docker(_ENGINE, sockets), "podman": of_podman()}
    holders = []
    for key, found in grouped.items():
        engine, unit = known.get(key, ("", ""))
        container = by_name.get(key)
        engine = container.engine if container is not None else engine
        engine = next((name for name, ids in called.items() if key in ids), engine)
        name = called.get(engine, {}).get(key, ("", ""))[0] or key
        if container is not None and container.pod:
            name = f"{container.namespace}/{container.pod}/{container.container}"
        policy = _restarts(case, engine, key, unit, sockets)
        holders.append(_holder(DriverUser(name, key, engine, found, policy, ""), unit))
    return holders


def _holder(one: DriverUser, unit: str) -> DriverUser:
    """Return a holder with its remedy."""
    if one.engine in _PODS:
        return one._replace(remedy=f"Run kubectl drain {os.uname().nodename}")
    if one.engine == SLURM:
        job = one.id.partition(":")[2]
        return one._replace(remedy=f"Wait for the job, or run scancel {job}")
    if one.engine == "docker" or (one.engine == "podman" and not unit):
        return one._replace(remedy=f"Run {one.engine} stop {one.name}")
    if unit:
        return one._replace(remedy=f"Run systemctl stop {unit}")
    if one.id.startswith("process "):
        return one._replace(name=one.processes[0].command, id="", remedy=f"End {one.id}")
    return one._replace(remedy="Stop this container")


def _restarts(case: Case, engine: str, container: str, unit: str, sockets: list[str]) -> str:
    """Return what restarts a container or a unit, as in ``DriverUser``."""
    if engine in _PODS:
        return "kubelet"
    if engine == "docker":
        policy = _docker_policy(sockets, container)
    elif engine == "podman" and not unit:
        policy = _podman_policy(case, container)
    elif unit:
        engine = "systemd"
        policy = _said(case, "systemctl", "show", "--property=Restart", "--value", unit)
    else:
        return ""
    return f"{engine}: {policy}" if policy not in ("", "no") else policy


def _docker_policy(sockets: list[str], container: str) -> str:
    """Return the restart policy of Docker's container, "" if unknown."""
    for socket in sockets:
        try:
            found: Any = docker_api.container(socket, container, _ENGINE)
            return str(found["HostConfig"]["RestartPolicy"]["Name"]) or "no"
        except (OSError, ValueError, LookupError, TypeError):
            continue
    return ""


def _podman_policy(case: Case, container: str) -> str:
    """Return the restart policy of podman's container, "" if unknown.

    podman is called with the options that its conmon has for it, such as those of its storage.
    """
    what = "{{.HostConfig.RestartPolicy.Name}}"
    for process in case.machine.processes("conmon"):
        if process.option("-c", "--cid")[-1:] == [container]:
            words = process.option("--exit-command-arg")
            given = words[: words.index("container")] if "container" in words else []
            inspect = ("container", "inspect", "--format", what, container)
            return _said(case, "podman", *given, *inspect) or "no"
    return ""


def _said(case: Case, program: str, *words: str) -> str:
    path = case.machine.which(program, names.SEARCH_PATH)
    found = output(case.machine, path, *words).decode("utf-8", "replace").strip() if path else ""
    return found if found.replace("-", "").isalpha() else ""


def _finding(holder: DriverUser) -> Finding:
    """Return the finding for a holder: a failure if it has the driver open."""
    name = printable(f"{holder.engine}:{holder.name}" if holder.engine else holder.name)
    again = {"": "; what restarts it is unknown", "no": "; nothing restarts it"}.get(
        holder.restarts, f"; it is restarted by {holder.restarts}"
    )
    if not holder.processes:
        text = f"{name} has devices, open in no process now; it keeps the present driver's files"
        remedy = f"{holder.remedy}, or start it again after the update{again}"
        return warning("stale-container", text, printable(remedy))
    processes = [f"{each.pid} ({printable(each.command)})" for each in holder.processes]
    nodes = sorted({node for each in holder.processes for node in each.nodes})
    what = "processes" if len(processes) > 1 else "process"
    text = f"{name} has {listed(nodes, _SHOWN)} open in {what} {listed(processes, _SHOWN)}"
    return failure("driver-in-use", text, printable(f"{holder.remedy}{again}"))

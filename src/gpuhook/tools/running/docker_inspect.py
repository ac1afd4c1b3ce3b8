"""Devices of Docker's containers from docker inspect, for non-root users with access to Docker.

Such a user, for example in the group docker, can read neither gpuhook's records nor the mounts of
root's containers. Docker returns the settings of ``docker run``. gpu-py derived the devices from
them, and the same rules are applied here again.

Source: ContainerInspect of the Docker Engine API (api/swagger.yaml of moby/moby).
"""

import contextlib
import os
import time
from collections.abc import Collection, Iterator
from typing import Any

from gpuhook.base import names
from gpuhook.base.config.model import Config
from gpuhook.base.errors import GpuhookError
from gpuhook.core.inventory.model import Device, Inventory
from gpuhook.core.inventory.selection import select
from gpuhook.core.resolve import resolve
from gpuhook.monitor.containers.device_users import MAX_CONTAINERS, RunningContainer, command_of
from gpuhook.monitor.containers.nodes import Numbers
from gpuhook.tools.engines import docker_api, docker_gpus
from gpuhook.tools.running.names import docker_sockets
from gpuhook.vendors import registry

_PATIENCE = 0.5  # seconds for all queries; those for names may take another half
_ADMINISTRATOR = {"ALL", "SYS_ADMIN", "CAP_SYS_ADMIN"}


def asked(
    config: Config, inventories: Collection[Inventory], but: Collection[RunningContainer] = ()
) -> list[RunningContainer]:
    """Return Docker's running containers that have devices, except those in ``but``.

    Empty for root, because other sources show root more. A Docker that doesn't respond in time
    is skipped.
    """
    if os.geteuid() == 0 or not inventories:
        return []
    end = time.monotonic() + _PATIENCE
    known = {each.name for each in but}
    found: list[RunningContainer] = []
    for path in docker_sockets():
        docker = _Docker(path, end)
        try:
            for entry in docker.containers():
                container = _container(docker, entry, config, inventories)
                if container is not None and container.name not in known:
                    found.append(container)
        except (OSError, ValueError):
            continue
    return found[:MAX_CONTAINERS]


class _Docker:
    """A Docker daemon, queried until ``end``, a time of the monotonic clock.

    Its methods raise OSError or ValueError as ``docker_api.ask`` does.
    """

    def __init__(self, path: str, end: float) -> None:
        self._path = path
        self._end = end
        self._runtimes: dict[str, str] | None = None

    def containers(self) -> Iterator[dict[str, Any]]:
        """Yield the description of each running container."""
        for each in docker_api.containers(self._path, self._left()):
            answer = docker_api.container(self._path, str(each.get("Id")), self._left())
            if isinstance(answer, dict):
                yield answer

    def has_ours_as(self, runtime: object) -> bool:
        """Return whether the daemon's runtime of this name is gpu-py."""
        if self._runtimes is None:
            self._runtimes = docker_api.runtimes_of(docker_api.ask(self._path, self._left()))
        program = os.path.realpath(self._runtimes.get(str(runtime), ""))
        return os.path.basename(program) == names.RUNTIME

    def _left(self) -> float:
        left = self._end - time.monotonic()  # protects: docker-asked-in-time
        if left <= 0:
            raise TimeoutError("it took too long to answer")
        return left


def _container(
    docker: _Docker, entry: dict[str, Any], config: Config, inventories: Collection[Inventory]
) -> RunningContainer | None:
    """Return a container with the devices from its start, None if it has none."""
    settings = _table(entry, "HostConfig")
    pid = _table(entry, "State").get("Pid")
    requests = _list(settings, "DeviceRequests")
    gpus = docker_gpus.of_requests(requests)
    spec = _spec(entry, gpus)
    devices = [*_of_documents(requests, config, inventories)]
    resolved = _resolved(str(entry.get("Id")), spec, config, inventories)
    if resolved and (gpus or docker.has_ours_as(settings.get("Runtime"))):
        devices += resolved
    elif settings.get("Privileged"):  # engines give it every node in /dev
        devices += [(each, device) for each in inventories for device in each.devices]
    nodes = _numbers(devices) | _of_paths(settings, inventories)
    if not nodes or not isinstance(pid, int):
        return None
    name = str(entry.get("Id"))
    return RunningContainer(name, "docker", pid, command_of(pid), nodes, is_asked=True)


def _spec(entry: dict[str, Any], gpus: list[str]) -> dict[str, Any]:
    """Return the parts of its config.json that can contain a request."""
    settings = _table(entry, "HostConfig")
    added = {str(each).upper() for each in _list(settings, "CapAdd")}
    may_all = settings.get("Privileged") or not added.isdisjoint(_ADMINISTRATOR)
    words = [each for each in _list(_table(entry, "Config"), "Env") if isinstance(each, str)]
    mounts = [each for each in _list(entry, "Mounts") if isinstance(each, dict)]
    return {
        "process": {
            "env": [*words, *gpus],
            "capabilities": {"bounding": ["CAP_SYS_ADMIN"] if may_all else []},
        },
        "mounts": [
            {"source": each.get("Source"), "destination": each.get("Destination")}
            for each in mounts
        ],
        "annotations": _table(settings, "Annotations"),
    }


Found = tuple[Inventory, Device]


def _resolved(
    container: str, spec: dict[str, Any], config: Config, inventories: Collection[Inventory]
) -> list[Found]:
    """Return the devices that gpu-py, or its hook that Docker adds for --gpus, gives it."""
    ours = {each.vendor: each for each in inventories}
    vendors = {name: each for name, each in registry.all_vendors(config).items() if name in ours}
    try:
        made = resolve(spec, config, vendors, container=container, save=False, inventories=ours)
    except GpuhookError:
        return []  # it would not start now, so its devices are unknown
    grants = made.grants if made is not None else ()
    return [(grant.inventory, device) for grant in grants for device in grant.devices]


def _of_documents(
    requests: list[Any], config: Config, inventories: Collection[Inventory]
) -> Iterator[Found]:
    """Yield the devices that Docker gave from CDI specs (--device nvidia.com/gpu=0)."""
    vendors = registry.all_vendors(config)
    for name in docker_gpus.cdi_names(requests):
        kind, _, device = name.partition("=")
        for inventory in inventories:
            vendor = vendors[inventory.vendor]
            if kind == vendor.KIND:
                with contextlib.suppress(GpuhookError):  # the device is gone
                    yield from ((inventory, each) for each in select([device], inventory, vendor))


def _of_paths(settings: dict[str, Any], inventories: Collection[Inventory]) -> set[Numbers]:
    """Return the nodes of --device PATH."""
    tables = [each for each in _list(settings, "Devices") if isinstance(each, dict)]
    paths = {each.get("PathOnHost") for each in tables}
    return {
        node.numbers
        for each in inventories
        for node in each.nodes
        if each.root.rstrip("/") + node.path in paths
    }


def _numbers(devices: list[Found]) -> set[Numbers]:
    nodes = [each.node(path) for each, device in devices for path in device.nodes]
    return {node.numbers for node in nodes if node is not None}


def _table(data: dict[str, Any], key: str) -> dict[str, Any]:
    value = data.get(key)
    return value if isinstance(value, dict) else {}


def _list(data: dict[str, Any], key: str) -> list[Any]:
    value = data.get(key)
    return value if isinstance(value, list) else []

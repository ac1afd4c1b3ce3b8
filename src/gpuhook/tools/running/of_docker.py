"""What Docker says its containers were started with, for a user who isn't root but may ask it.

Such a user, of group docker for example, can read neither our records nor what a container of
root's has mounted. Docker's answer has the settings of ``docker run``, of which gpu-py made
devices by rules that are applied here once more.

Source: ContainerInspect of the Docker Engine API (api/swagger.yaml of moby/moby).
"""

import contextlib
import os
import time
from collections.abc import Collection, Iterator
from typing import Any

from gpuhook.ground import names
from gpuhook.ground.config.model import Config
from gpuhook.ground.errors import GpuhookError
from gpuhook.start.inventory.model import Device, Inventory
from gpuhook.start.inventory.selection import select
from gpuhook.start.resolve import resolve
from gpuhook.tools.engines import docker_api, docker_gpus
from gpuhook.tools.running.holders import LIMIT, Container, command_of
from gpuhook.tools.running.names import docker_sockets
from gpuhook.tools.running.nodes import Numbers
from gpuhook.vendors import registry

_PATIENCE = 0.5  # seconds for all that is asked: to ask for names may take another half
_ADMINISTRATOR = {"ALL", "SYS_ADMIN", "CAP_SYS_ADMIN"}


def asked(
    config: Config, inventories: Collection[Inventory], but: Collection[Container] = ()
) -> list[Container]:
    """Return Docker's running containers that have devices, without those that are in ``but``.

    None for root, who sees more by looking, and none of a Docker that doesn't answer us in time.
    """
    if os.geteuid() == 0 or not inventories:
        return []
    end = time.monotonic() + _PATIENCE
    known = {each.name for each in but}
    found: list[Container] = []
    for path in docker_sockets():
        docker = _Docker(path, end)
        try:
            for entry in docker.containers():
                container = _container(docker, entry, config, inventories)
                if container is not None and container.name not in known:
                    found.append(container)
        except (OSError, ValueError):
            continue
    return found[:LIMIT]


class _Docker:
    """One daemon that is asked until ``end``, a time of the monotonic clock.

    Its methods raise OSError or ValueError as ``docker_api.ask`` does.
    """

    def __init__(self, path: str, end: float) -> None:
        self._path = path
        self._end = end
        self._runtimes: dict[str, str] | None = None

    def containers(self) -> Iterator[dict[str, Any]]:
        """Yield what describes each running container."""
        for each in docker_api.containers(self._path, self._left()):
            answer = docker_api.container(self._path, str(each.get("Id")), self._left())
            if isinstance(answer, dict):
                yield answer

    def has_ours_as(self, runtime: object) -> bool:
        """Tell whether it calls gpu-py by this name."""
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
) -> Container | None:
    """Return a container with the devices that it was started with, None if it has none."""
    settings = _table(entry, "HostConfig")
    pid = _table(entry, "State").get("Pid")
    requests = _list(settings, "DeviceRequests")
    gpus = docker_gpus.of_requests(requests)
    spec = _spec(entry, gpus)
    devices = [*_of_documents(requests, config, inventories)]
    resolved = _resolved(str(entry.get("Id")), spec, config, inventories)
    if resolved and (gpus or docker.has_ours_as(settings.get("Runtime"))):
        devices += resolved
    elif settings.get("Privileged"):  # an engine gives it whatever stands in /dev
        devices += [(each, device) for each in inventories for device in each.devices]
    nodes = _numbers(devices) | _of_paths(settings, inventories)
    if not nodes or not isinstance(pid, int):
        return None
    name = str(entry.get("Id"))
    return Container(name, "docker", pid, command_of(pid), nodes, is_asked=True)


def _spec(entry: dict[str, Any], gpus: list[str]) -> dict[str, Any]:
    """Return of its config.json what a request may stand in."""
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
    """Return what gpu-py, or its hook that Docker adds for --gpus, makes of it."""
    ours = {each.vendor: each for each in inventories}
    vendors = {name: each for name, each in registry.known(config).items() if name in ours}
    try:
        made = resolve(spec, config, vendors, container=container, save=False, inventories=ours)
    except GpuhookError:
        return []  # it would not start today, so what it was given isn't known
    grants = made.grants if made is not None else ()
    return [(grant.inventory, device) for grant in grants for device in grant.devices]


def _of_documents(
    requests: list[Any], config: Config, inventories: Collection[Inventory]
) -> Iterator[Found]:
    """Yield the devices that Docker gave by CDI documents (--device nvidia.com/gpu=0)."""
    known = registry.known(config)
    for name in docker_gpus.cdi_names(requests):
        kind, _, device = name.partition("=")
        for inventory in inventories:
            vendor = known[inventory.vendor]
            if kind == vendor.KIND:
                with contextlib.suppress(GpuhookError):  # it isn't here any more
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

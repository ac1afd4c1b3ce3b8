"""Search for a running container by its id or its engine's name, with or without devices."""

from collections.abc import Iterable
from typing import NamedTuple

from gpuhook.base.errors import ContainerError, shown
from gpuhook.core.inventory.model import Inventory
from gpuhook.core.records import records
from gpuhook.monitor.containers import device_users
from gpuhook.monitor.containers.device_users import RunningContainer
from gpuhook.monitor.host import processes
from gpuhook.tools.engines import docker_api
from gpuhook.tools.running import bundles, names

_PATIENCE = 5.0  # seconds for Docker's answer


class ContainerMatch(NamedTuple):
    """A running container; ``holder`` is None if it has no device.

    ``name`` is its name in the engine, ``bundle`` the folder with its config.json, and ``runtime``
    the low-level runtime that the engine calls for it; each is "" if unknown.
    """

    id: str
    engine: str
    name: str
    bundle: str
    runtime: str
    holder: RunningContainer | None


def find(word: str, inventories: Iterable[Inventory], state_dir: str) -> ContainerMatch:
    """Return the container for an id, the start of an id, or an engine's name.

    Raises ContainerError if no container or several containers match.
    """
    engines = {}
    called = {}
    # A user could see only the names of root's containers.
    ours = docker_api.sockets(processes.running("dockerd"))
    of_docker = names.of_docker(_PATIENCE, ours)
    for engine, known in (("docker", of_docker), ("podman", names.of_podman())):
        called.update({container: name for container, (name, _) in known.items()})
        engines.update(dict.fromkeys(known, engine))
    running = device_users.believed(device_users.running(inventories, state_dir).containers)
    held = {each.name: each for each in running}
    of_containerd = bundles.beside_shims()
    ours_too = bundles.first_processes()
    called = {**dict.fromkeys([*of_containerd, *ours_too, *held], ""), **called}
    found = names.meant(word, called)
    if len(found) != 1:
        what = "matches several containers" if found else "isn't a running container"
        raise ContainerError(
            f"{shown(word)} {what}",
            "Use an id or a name as the engine shows it, as root unless it is your rootless engine",
        )
    [container] = found
    holder = held.get(container)
    bundle = (holder.bundle if holder is not None else "") or bundles.find(container)
    engine = holder.engine if holder is not None else engines.get(container, "")
    engine = engine or records.engine_of(bundle, {})
    runtime = bundles.runtime(container, bundle)
    return ContainerMatch(container, engine, called[container], bundle, runtime, holder)

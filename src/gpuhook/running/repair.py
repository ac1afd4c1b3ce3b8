"""Give running containers back the devices that their cgroups no longer allow.

``systemctl daemon-reload`` and ``docker update`` write a container's device rules again, and
what only the cgroup knew is lost: "Failed to initialize NVML: Unknown Error".

What a container was given is what we wrote down when it was injected (``records``), or what
root's own config.json says (``bundles``). Its /dev and its mounts are never asked: a
container with CAP_MKNOD makes what nodes it likes, and mounts them in a user namespace.
"""

import os
import subprocess
from collections.abc import Collection, Iterable

from gpuhook.cgroup import access
from gpuhook.errors import ContainerError
from gpuhook.inventory.model import Inventory
from gpuhook.running import bundles, records
from gpuhook.running.holders import Container, Numbers

_ENGINES = ("docker", "podman")
_SHORTEST_ID = 4
_TIMEOUT_S = 20


def repair(container: Container, inventories: Collection[Inventory]) -> tuple[str, int]:
    """Allow a container the devices that it was given; return how, and how many.

    Raises CgroupError, and ContainerError where nothing says what it was given.
    """
    try:
        process = os.open(f"/proc/{container.pid}", os.O_PATH | os.O_CLOEXEC)
    except OSError:
        raise _ended(container) from None
    try:
        given = given_devices(container, process, inventories)
        return access.allow(process, given), len(given)
    finally:
        os.close(process)


def given_devices(
    container: Container, process: int, inventories: Collection[Inventory]
) -> list[Numbers]:
    """Return the devices that a container was given, of those that this machine has now.

    ``process`` is a descriptor of /proc/PID of its first process.
    """
    try:
        started = records.started(process)
    except OSError:
        raise _ended(container) from None
    present = {node.numbers for inventory in inventories for node in inventory.nodes}
    if container.record is None:
        allowed = bundles.allowed_devices(container.pid, started, present)
        if not allowed:
            raise ContainerError(
                f"{container.name} has no record of what it was given, and no config.json that "
                "allows it a device",
                "Start it again: its GPUs were given by something else than gpuhook, or by a "
                "version before records were kept",
            )
        return allowed
    if started != container.record["started"]:
        raise _ended(container)
    _check_devices(container, inventories)
    return sorted(container.nodes & present)


def _check_devices(container: Container, inventories: Iterable[Inventory]) -> None:
    """Refuse where a device has other numbers than when the container got it."""
    now: dict[tuple[str, str], list[list[int]]] = {}  # by vendor and id
    for inventory in inventories:
        numbers = {node.path: list(node.numbers) for node in inventory.nodes}
        for device in inventory.devices:
            found = [numbers[path] for path in device.nodes if path in numbers]
            now[inventory.vendor, device.id] = found
    moved = [
        name
        for one in (container.record or {})["given"]
        for name, nodes in one["nodes"].items()
        if now.get((one["vendor"], name)) != nodes
    ]
    if moved:
        raise ContainerError(
            f"{container.name} was given {', '.join(moved)}, which this machine has no more, or "
            "under another number",
            "Start it again",
        )


def _ended(container: Container) -> ContainerError:
    return ContainerError(
        f"The first process of {container.name} has ended", "Start the container again"
    )


def select(names: Iterable[str], running: Collection[Container]) -> list[Container]:
    """Return the containers that the names (ids, their beginnings, engines' names) mean.

    Raises ContainerError for a name that means none of them, or several.
    """
    chosen = []
    for name in names:
        found = _by_id(name, running) or _by_id(_ask_engines(name), running)
        if len(found) != 1:
            what = "means several containers" if found else "is no running container with a GPU"
            raise ContainerError(
                f"{name} {what}",
                "Use an id or name as `gpuhook list` or the engine shows it, or --all",
            )
        chosen += found
    return chosen


def _by_id(name: str, running: Collection[Container]) -> list[Container]:
    exact = [each for each in running if each.name == name]
    if exact or len(name) < _SHORTEST_ID:
        return exact
    return [each for each in running if each.name.startswith(name)]


def _ask_engines(name: str) -> str:
    """Return the id of the container that an engine calls by that name, "" if none does."""
    for engine in _ENGINES:
        argv = [engine, "container", "inspect", "--format", "{{.Id}}", "--", name]
        try:
            done = subprocess.run(
                argv, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
            )
        except (OSError, subprocess.SubprocessError):
            continue
        return done.stdout.strip()
    return ""

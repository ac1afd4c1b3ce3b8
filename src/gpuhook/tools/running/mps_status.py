"""The status of MPS: the daemon, its devices, and the containers that are its clients."""

from typing import Any

from gpuhook.base.config.model import Config
from gpuhook.base.errors import GpuhookError, MpsError
from gpuhook.base.host import proc
from gpuhook.base.state_directory import StateDirectory
from gpuhook.core.records import records
from gpuhook.monitor.mps.keep import MpsController
from gpuhook.tools.running.names import Names
from gpuhook.vendors.nvidia import mps, mps_mounts


def status(config: Config) -> dict[str, Any] | None:
    """Return the status as JSON values; None if gpuhook doesn't manage MPS.

    ``problem`` says why the daemon can't be used, "" if it can. Each container has its
    ``clients``, the process ids of its programs that use MPS; ``others`` are in no container.
    """
    state = mps.read(config.state_dir)
    if state is None:
        return None
    problem, clients = "", list[int]()
    keeper = MpsController(config, lambda _: None)
    try:
        keeper.check(state)
        clients = keeper.control(state).clients()
    except GpuhookError as error:
        problem = str(error)
    containers = _containers(config)
    theirs = [pid for each in containers for pid in _of(each.pop("cgroups"), clients, each)]
    return {
        "version": state.version,
        "process": int(state.daemon.partition("-")[0]) if mps.lives(state) else None,
        "problem": problem,
        "active_thread_percentage": state.threads or None,
        "most_containers": state.clients,
        "devices": [
            {"index": each.index, "uuid": each.uuid, "memory": each.memory or None}
            for each in state.devices
        ],
        "containers": containers,
        "others": [pid for pid in clients if pid not in theirs],
    }


def check(config: Config) -> None:
    """Raise MpsError or DriverError if MPS, which config.toml enables, can't be used."""
    state = mps.read(config.state_dir)
    if state is None:
        raise MpsError("MPS' control daemon isn't running", mps.START)
    MpsController(config, lambda _: None).check(state)


def _containers(config: Config) -> list[dict[str, Any]]:
    """Return the containers that hold an MPS slot, by their records."""
    folder = StateDirectory.open(f"{config.state_dir}/{mps.FOLDER}/{mps.CLAIMS}")
    if folder is None:
        return []
    with folder:
        taken = mps_mounts.claims(folder)
    known = {records.name_of(each): each for each in records.read_all(config.state_dir)}
    found = [known.get(process, {}) for process, _ in taken.values()]
    names = Names()
    names.ask([(each["engine"], each["id"], each["bundle"]) for each in found if each])
    return [
        {
            "place": place,
            "id": record.get("id", ""),
            "name": names.of(record.get("id", ""))[0],
            "pod": "/".join(filter(None, (record.get("namespace"), record.get("pod")))),
            "engine": record.get("engine", ""),
            "process": int(process.partition("-")[0]),
            "devices": devices,
            "cgroups": record.get("cgroups", {}),
            "clients": [],
        }
        for (place, (process, devices)), record in zip(taken.items(), found, strict=True)
    ]


def _of(cgroups: dict[str, str], clients: list[int], container: dict[str, Any]) -> list[int]:
    """Record and return the clients in a container's cgroup, or below it."""
    for pid in clients:
        theirs = proc.cgroups(proc.data_of(f"/proc/{pid}/cgroup"))
        if any(_is_in(path, own) for own in cgroups.values() for path in theirs.values()):
            container["clients"].append(pid)
    found: list[int] = container["clients"]
    return found


def _is_in(path: str, own: str) -> bool:
    return own not in ("", "/") and (path == own or path.startswith(f"{own}/"))

"""Check for containers and daemons that still need gpu-py, before it is removed.

A container's shim (containerd, Docker) or conmon (podman, CRI-O) keeps the path of the runtime
that created the container, and calls it for exec, stop and delete. A daemon keeps the default
runtime that it has loaded. Only root's processes are examined.
"""

import os
import shlex
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from gpuhook.base.errors import EngineError
from gpuhook.base.host import files as host_files
from gpuhook.monitor.host import processes as host_processes
from gpuhook.monitor.host.processes import Process
from gpuhook.tools.engines import containerd_files, docker_api
from gpuhook.tools.engines.merge import Document, get
from gpuhook.tools.engines.store import FileRecord, Store

_MAX_PATH = 4096  # bytes, PATH_MAX
_SCRIPT = 4096  # bytes of the script that Docker writes for a runtime with arguments
_SHORT = 12  # characters of a container's id, as Docker prints it
# Daemons that read their files only at start-up: the default file, the key of the default runtime.
_READ_AT_START = {
    "containerd": ("/etc/containerd/config.toml", "default_runtime_name"),
    "crio": ("/etc/crio/crio.conf", "default_runtime"),
}


@dataclass(frozen=True)
class DependentContainer:
    """A container created by gpu-py that isn't deleted yet; ``end`` is the command to remove it.

    ``engine`` is the one that it belongs to.
    """

    container: str
    end: tuple[str, ...]
    engine: str


def check(program: str, store: Store, records: Iterable[FileRecord]) -> None:
    """Raise EngineError while a container or a daemon needs ``program``, gpu-py's path.

    ``records`` are the changes about to be removed.
    """
    records = list(records)
    _check_containers(program)  # protects: containers-in-use
    _check_dockers(program, [record.config for record in records if record.engine == "docker"])
    for record in records:
        _check_daemon(store.written(record), record)


def check_running(store: Store, records: Iterable[FileRecord]) -> None:
    """Raise EngineError while a container runs that an engine created with a recorded runtime.

    ``records`` are the changes about to be removed. The container goes on without them, but the
    engine can't start it again.
    """
    found: list[DependentContainer] = []
    for record in records:
        for program in sorted(_programs(store.written(record), record)):
            every = [*_of_shims(program), *_of_conmons(program)]
            found += [each for each in every if each.engine == record.engine]
    if found:
        found = list(dict.fromkeys(found))
        names = ", ".join(each.container for each in found)
        raise EngineError(
            f"These containers are running, and can't be started again without gpu-py: {names}",
            f"Run this first: {' && '.join(_commands(found))}; or continue with gpuhook uninstall "
            "--force",
        )


def _programs(written: Document, record: FileRecord) -> set[str]:
    """Return the programs of the runtimes that we wrote to an engine's file."""
    tables = [get(written, path) for path in record.owned if path[-2:-1] == ("runtimes",)]
    paths = (text for table in tables for text in _texts(table) if text.startswith("/"))
    return {path for path in paths if os.path.isfile(path) and os.access(path, os.X_OK)}


def _check_containers(program: str) -> None:
    found = list(dict.fromkeys([*_of_shims(program), *_of_conmons(program)]))
    if found:
        names = ", ".join(each.container for each in found)
        raise EngineError(
            f"These containers can't be entered, stopped or deleted without {program}: {names}",
            f"Run this first: {' && '.join(_commands(found))}",
        )


def _commands(found: Iterable[DependentContainer]) -> list[str]:
    """Return the fewest commands that remove the containers."""
    words: dict[tuple[str, ...], list[str]] = {}
    for each in found:
        words.setdefault(each.end, []).append(each.container)
    drain = shlex.join(("kubectl", "drain", "--ignore-daemonsets", os.uname().nodename))
    return [shlex.join((*end, *names)) if end else drain for end, names in words.items()]


def _of_shims(program: str) -> Iterator[DependentContainer]:
    """Yield containers of containerd and Docker, from the working directories of their shims."""
    for process in host_processes.running("containerd-shim-runc-v2"):
        try:
            runtime = host_files.read(f"/proc/{process.pid}/cwd/runtime", _MAX_PATH)
        except OSError:
            continue
        namespace, name = ((process.option(option) or [""])[-1] for option in ("-namespace", "-id"))
        if not _leads_to(process, os.fsdecode(runtime), program):
            continue
        if namespace == "moby":
            yield DependentContainer(name[:_SHORT], ("docker", "stop"), "docker")
        elif namespace == "k8s.io":
            yield DependentContainer(name[:_SHORT], (), "containerd")
        else:
            end = ("ctr", "-n", namespace, "tasks", "delete", "--force")
            yield DependentContainer(name, end, "containerd")


def _of_conmons(program: str) -> Iterator[DependentContainer]:
    """Yield containers of podman and CRI-O."""
    for process in host_processes.running("conmon"):
        if _leads_to(process, of_conmon(process, "-r", "--runtime"), program):
            ends_with = os.path.basename(of_conmon(process, "--exit-command"))
            is_podman = ends_with.startswith("podman")
            name = of_conmon(process, "-n", "--name")
            end, engine = (("podman", "stop"), "podman") if is_podman else ((), "crio")
            yield DependentContainer(name, end, engine)


def of_conmon(process: Process, *names: str) -> str:
    """Return the value of an option of conmon(8), "" if it isn't given.

    podman's own arguments may follow as --exit-command-arg, so the first occurrence counts.
    """
    return (process.option(*names) or [""])[0]


def _leads_to(process: Process, path: str, program: str) -> bool:
    """Tell whether a path in a process is our program, or a Docker script that calls it."""
    path = shutil.which(path) or "" if path and not os.path.isabs(path) else path
    seen = process.root + path
    try:
        return bool(path) and (
            os.path.samefile(seen, program)
            or os.fsencode(program) in host_files.read_start(seen, _SCRIPT)
        )
    except OSError:
        return False


def _check_dockers(program: str, configs: list[str]) -> None:
    """Refuse while a dockerd has our program as its default, and no removal drops it."""
    for answer in docker_api.asked(host_processes.running("dockerd")):
        process, default = answer.process, answer.default_runtime
        if any(process.reads(answer.config_path, config) for config in configs):
            continue
        if _leads_to(process, answer.runtimes.get(default, ""), program):
            raise EngineError(
                f"The running dockerd {process.pid} has {default} ({program}) as its default "
                f"runtime, which gpuhook install didn't write to {answer.config_path}",
                "Remove it from that file and from dockerd's options, and run this first: "
                "systemctl restart docker",
            )


def _check_daemon(written: Document, record: FileRecord) -> None:
    """Refuse while a daemon has our default runtime, which it drops only at a restart."""
    if record.engine not in _READ_AT_START:
        return
    usual, key = _READ_AT_START[record.engine]
    ours = {path[-1] for path in record.owned}
    if not ours.intersection(_values(written, key)):
        return
    for process in host_processes.running(record.engine):
        config = (process.option("--config", "-c") or [usual])[-1]
        if process.reads(config, record.config):
            raise EngineError(
                f"The running {record.engine} {process.pid} has gpu-py as its default runtime, "
                "and reads its configuration only at start-up",
                f"Run this first: gpuhook uninstall --engine {record.engine} && {_restart(record)}",
            )


def _restart(record: FileRecord) -> str:
    owner = containerd_files.distribution(record.config) if record.engine == "containerd" else None
    return owner.restart if owner is not None else f"systemctl restart {record.engine}"


def _texts(value: object) -> Iterator[str]:
    """Yield the strings in tables and lists, at any depth."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _texts(each)


def _values(document: object, key: str) -> Iterator[str]:
    """Yield the string values of a key, at any depth of the tables."""
    if isinstance(document, dict):
        for name, value in document.items():
            if name == key and isinstance(value, str):
                yield value
            yield from _values(value, key)

"""What stands in the way of removing gpu-py itself: who would call it when it is gone.

A container's shim (containerd, Docker) or conmon (podman, CRI-O) keeps the path of the runtime
that made the container, and calls it to start something in it, to stop it and to delete it.
A daemon keeps the default runtime that it has read. Only root's processes are asked.
"""

import os
import shlex
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from gpuhook.ground.errors import EngineError
from gpuhook.ground.host import files as host_files
from gpuhook.tools.engines import containerd_files, docker_api
from gpuhook.tools.engines.merge import Document
from gpuhook.tools.engines.store import Record, Store
from gpuhook.tools.host import processes as host_processes
from gpuhook.tools.host.processes import Process

_PATH_LIMIT = 4096  # bytes, PATH_MAX
_SCRIPT = 4096  # bytes of the script that Docker writes for a runtime with arguments
_SHORT = 12  # characters of a container's id, as Docker prints it
# Daemons that read their files only when they start: the usual file, the key of the default.
_READ_AT_START = {
    "containerd": ("/etc/containerd/config.toml", "default_runtime_name"),
    "crio": ("/etc/crio/crio.conf", "default_runtime"),
}


@dataclass(frozen=True)
class Needing:
    """A container that was made by gpu-py and hasn't been deleted; ``end`` is a command."""

    container: str
    end: tuple[str, ...]


def check(program: str, store: Store, records: Iterable[Record]) -> None:
    """Raise EngineError while a container or a daemon needs the program, gpu-py's path.

    ``records`` are what is about to be taken back.
    """
    records = list(records)
    _check_containers(program)  # protects: containers-in-use
    _check_dockers(program, [record.config for record in records if record.engine == "docker"])
    for record in records:
        _check_daemon(store.written(record), record)


def _check_containers(program: str) -> None:
    found = list(dict.fromkeys([*_of_shims(program), *_of_conmons(program)]))
    if found:
        names = ", ".join(each.container for each in found)
        raise EngineError(
            f"These containers can't be entered, stopped or deleted without {program}: {names}",
            f"Run this first: {' && '.join(_commands(found))}",
        )


def _commands(found: Iterable[Needing]) -> list[str]:
    """Return the fewest commands that end the containers."""
    words: dict[tuple[str, ...], list[str]] = {}
    for each in found:
        words.setdefault(each.end, []).append(each.container)
    drain = shlex.join(("kubectl", "drain", "--ignore-daemonsets", os.uname().nodename))
    return [shlex.join((*end, *names)) if end else drain for end, names in words.items()]


def _of_shims(program: str) -> Iterator[Needing]:
    """Yield the containers of containerd and Docker: a shim works in its container's folder."""
    for process in host_processes.running("containerd-shim-runc-v2"):
        try:
            runtime = host_files.read(f"/proc/{process.pid}/cwd/runtime", _PATH_LIMIT)
        except OSError:
            continue
        namespace, name = ((process.option(option) or [""])[-1] for option in ("-namespace", "-id"))
        if not _leads_to(process, os.fsdecode(runtime), program):
            continue
        if namespace == "moby":
            yield Needing(name[:_SHORT], ("docker", "stop"))
        elif namespace == "k8s.io":
            yield Needing(name[:_SHORT], ())
        else:
            yield Needing(name, ("ctr", "-n", namespace, "tasks", "delete", "--force"))


def _of_conmons(program: str) -> Iterator[Needing]:
    """Yield the containers of podman and CRI-O."""
    for process in host_processes.running("conmon"):
        if _leads_to(process, of_conmon(process, "-r", "--runtime"), program):
            ends_with = os.path.basename(of_conmon(process, "--exit-command"))
            is_podman = ends_with.startswith("podman")
            name = of_conmon(process, "-n", "--name")
            yield Needing(name, ("podman", "stop") if is_podman else ())


def of_conmon(process: Process, *names: str) -> str:
    """Return the value of an option of conmon(8), "" without it.

    Further words of podman's may follow as --exit-command-arg, so the first one counts.
    """
    return (process.option(*names) or [""])[0]


def _leads_to(process: Process, path: str, program: str) -> bool:
    """Tell whether a path of a process is our program, or a script of Docker's that calls it."""
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
    """Refuse while a dockerd has our program as its default that isn't about to forget it."""
    for answer in docker_api.asked(host_processes.running("dockerd")):
        process, default = answer.process, answer.default_runtime
        if any(process.reads(answer.config_path, config) for config in configs):
            continue
        if _leads_to(process, answer.runtimes.get(default, ""), program):
            raise EngineError(
                f"The running dockerd {process.pid} has {default} ({program}) as its default "
                f"runtime, and it isn't what gpuhook install wrote to {answer.config_path}",
                "Take it out of that file and of dockerd's options, and run this first: "
                "systemctl restart docker",
            )


def _check_daemon(written: Document, record: Record) -> None:
    """Refuse while a daemon has our default that only a restart makes it forget."""
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
                f"The running {record.engine} {process.pid} makes containers with gpu-py that "
                "name no other runtime, and reads its configuration only at its start",
                f"Run this first: gpuhook uninstall --engine {record.engine} && {_restart(record)}",
            )


def _restart(record: Record) -> str:
    owner = containerd_files.distribution(record.config) if record.engine == "containerd" else None
    return owner.restart if owner is not None else f"systemctl restart {record.engine}"


def _values(document: object, key: str) -> Iterator[str]:
    """Yield the texts that a key has, wherever in the tables it stands."""
    if isinstance(document, dict):
        for name, value in document.items():
            if name == key and isinstance(value, str):
                yield value
            yield from _values(value, key)

"""Checks of Docker: the runtime is registered and loaded, --gpus works, Docker isn't a snap."""

import errno
import json
import os
import shlex
from collections.abc import Iterator

from gpuhook.base import names
from gpuhook.monitor.host.processes import START_PRECISION
from gpuhook.tools.doctor.case import Case
from gpuhook.tools.doctor.engine_files import unread
from gpuhook.tools.doctor.finding import Finding, failure, note, ok, warning
from gpuhook.tools.doctor.host import is_ours
from gpuhook.tools.doctor.machine import Machine, seen_by
from gpuhook.tools.engines import installed
from gpuhook.tools.engines.docker import program_of
from gpuhook.tools.engines.docker_api import DEFAULT_CONFIG, DockerInfo

_HOOK = names.TOOLKIT_HOOKS[0]


def docker(case: Case) -> Iterator[Finding]:
    """Compare daemon.json with the settings loaded by each running dockerd."""
    yield from _snap(case)
    if not case.dockers and case.machine.which("dockerd", names.SEARCH_PATH):
        paths = [path for path in case.settings("docker/daemon.json") if case.machine.exists(path)]
        yield from _registered(case, case.machine, (paths or [DEFAULT_CONFIG])[-1], {})
        yield ok("docker-loaded", "dockerd is installed and not running")
    for found in case.dockers:
        version = str((found.info or {}).get("ServerVersion", ""))
        machine = seen_by(found.process)
        yield from _registered(case, machine, found.config_path, found.runtimes, version)
        yield from _loaded(found)
        yield from _gpus_option(found)


def _snap(case: Case) -> Iterator[Finding]:
    if case.machine.exists("/snap/bin/docker") or case.machine.exists("/var/snap/docker"):
        yield warning(
            "docker-snap",
            "Docker is installed as a snap, which can't run programs outside of it",
            "Remove the snap and install Docker's or the distribution's package",
        )


def _runtimes(machine: Machine, path: str) -> dict[str, str]:
    """Return daemon.json's runtimes, name -> path; ValueError if it isn't JSON."""
    settings = json.loads(machine.text(path) or "{}")
    runtimes = settings.get("runtimes", {}) if isinstance(settings, dict) else {}
    return {
        name: program_of(entry) or ""
        for name, entry in (runtimes.items() if isinstance(runtimes, dict) else ())
        if isinstance(entry, dict)
    }


def _registered(
    case: Case, machine: Machine, path: str, loaded: dict[str, str], version: str = ""
) -> Iterator[Finding]:
    if machine.is_closed(path):
        case.unseen.append(path)
        yield closed("docker", path)
        return
    if why := unread(machine, "docker", path, version):
        remedy = "Save it as UTF-8 without a byte order mark"
        yield failure("docker-registered", f"{path} {why}", remedy)
        return
    try:
        runtimes = _runtimes(machine, path)
    except ValueError as error:
        text = f"{path} isn't JSON, and dockerd won't start with it: {error}"
        remedy = "Correct the file; since Docker 23, dockerd --validate checks it"
        yield failure("docker-registered", text, remedy)
        return
    ours = {name: program for name, program in runtimes.items() if is_gpu_py(machine, program)}
    install = install_command("docker", path, case.settings("docker/daemon.json"))
    if ours or any(is_gpu_py(machine, program) for program in loaded.values()):
        case.registered.append("docker")
    else:
        text = f"{path} doesn't register the runtime {names.RUNTIME}"
        yield note("docker-unused", text, f"To use it in Docker: {install}")
    for name, program in ours.items():
        if machine.is_program(program):
            yield ok("docker-registered", f"{path} registers the runtime {name}: {program}")
        else:
            yield failure(
                "docker-registered",
                f"{path} registers {program} as the runtime {name}, which can't be executed",
                f"Run {install} again, or gpuhook uninstall --engine docker",
            )


def install_command(engine: str, path: str, usual: list[str]) -> str:
    """Return the command that configures the engine that reads a file."""
    more = "" if path in usual else f" --config {shlex.quote(path)}"
    return f"gpuhook install --engine {engine}{more}"


def closed(engine: str, path: str) -> Finding:
    """Return the finding for an engine's file that we can't read."""
    text = f"You can't read {path}, so it is unknown whether {engine} has {names.RUNTIME}"
    return note(f"{engine}-unseen", text, "To check it: run gpuhook doctor as root")


def is_gpu_py(machine: Machine, program: str) -> bool:
    """Tell whether a configured program is our runtime, under any name."""
    return os.path.basename(program) == names.RUNTIME or is_ours(machine, program)


def _loaded(found: DockerInfo) -> Iterator[Finding]:
    who = f"The running dockerd ({found.socket_path})"
    if found.info is None:
        text = f"{who} couldn't be asked for its loaded settings: {found.problem}"
        if found.problem == os.strerror(errno.EACCES):
            yield note("docker-loaded", text, "To ask it: run gpuhook doctor as root")
        else:
            remedy = "See dockerd's log for the reason (journalctl -u docker)"
            yield warning("docker-loaded", text, remedy)
        return
    machine = seen_by(found.process)
    ours = [name for name, program in found.runtimes.items() if is_gpu_py(machine, program)]
    try:
        wanted = _runtimes(machine, found.config_path)
    except ValueError:
        wanted = {}
    for name, program in wanted.items():
        if is_gpu_py(machine, program) and found.runtimes.get(name) != program:
            yield failure(
                "docker-loaded",
                f"{who} hasn't loaded the runtime {name} that {found.config_path} registers",
                "Run systemctl reload docker (or send dockerd a SIGHUP)",
            )
            return
    if ours:
        default = found.default_runtime or "unknown"
        text = f"{who} has loaded {', '.join(ours)}; its default runtime is {default}"
        yield ok("docker-loaded", text)


def _is_newer(path: str, found: DockerInfo) -> bool:
    """Tell whether a link was made after the dockerd had started."""
    link = found.process.root + path
    try:
        made = os.lstat(link).st_ctime
    except OSError:
        return False
    started = found.process.started
    return os.path.islink(link) and 0 < started < made - START_PRECISION


def _gpus_option(found: DockerInfo) -> Iterator[Finding]:
    """Check --gpus, which depends on the programs that dockerd finds in its PATH at start-up.

    Since 29.2 Docker uses CDI specs, if it finds the CDI hook there, and the older hook for names
    in no spec. Before that it uses only the older hook.
    """
    if found.process.environment is None:
        text = "It is unknown whether docker run --gpus works: the PATH of dockerd can't be read"
        yield note("docker-gpus-option", text, "To check it: run gpuhook doctor as root")
        return
    folders = found.process.environment.get("PATH", names.SEARCH_PATH)
    path = seen_by(found.process).which(_HOOK, folders)
    version = str((found.info or {}).get("ServerVersion", ""))
    by_cdi = seen_by(found.process).which(names.TOOLKIT_CDI_HOOK, folders)
    if by_cdi and installed.serves_gpus_by_cdi("docker", version or None):
        yield note(
            "docker-gpus-option",
            f"docker run --gpus uses CDI specs in Docker {version} ({by_cdi})"
            + (f", or else {path}" if path else ""),
            "For --gpus all, a CDI spec must have the device all: see gpuhook cdi list",
        )
    elif path is None:
        yield note(
            "docker-gpus-option",
            "docker run --gpus, devices in compose files and dev containers don't work: "
            f"{_HOOK} isn't on dockerd's PATH",
            "To use them: gpuhook install --engine docker --gpus, and restart Docker",
        )
    elif _is_newer(path, found):
        yield warning(
            "docker-gpus-option",
            f"docker run --gpus doesn't work yet: {path} is newer than the running dockerd, which "
            "looks for it only at its start",
            "Restart Docker: systemctl restart docker",
        )
    elif is_ours(seen_by(found.process), path):
        yield ok("docker-gpus-option", f"docker run --gpus uses gpuhook: {path}")
    else:
        yield ok("docker-gpus-option", f"docker run --gpus uses NVIDIA's {path}")

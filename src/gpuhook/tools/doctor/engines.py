"""Checks of containerd, CRI-O and podman: the runtime or the hook registered, and loaded."""

import json
import os
import tomllib
from collections.abc import Iterator
from functools import partial

from gpuhook.base import names
from gpuhook.base.oci import jsontext
from gpuhook.core.cdi.versions import order
from gpuhook.monitor.host.processes import START_PRECISION, Process
from gpuhook.tools.doctor import distributions, without_daemon
from gpuhook.tools.doctor.case import Case
from gpuhook.tools.doctor.cdi import is_used
from gpuhook.tools.doctor.docker import closed, install_command, is_gpu_py
from gpuhook.tools.doctor.engine_files import (
    imports,
    output,
    programs_of,
    strings,
    table,
    toml,
    unread,
    version_in,
    version_of,
)
from gpuhook.tools.doctor.finding import Finding, failure, note, ok, warning
from gpuhook.tools.doctor.machine import Machine, seen_by
from gpuhook.tools.engines.ask import EngineRequest
from gpuhook.tools.engines.containerd_settings import MIGRATES_FILES, too_new
from gpuhook.tools.engines.podman import monitor_variables, own_runtime

CONTAINERD_FILE = "/etc/containerd/config.toml"
_FILES = {"containerd": CONTAINERD_FILE, "crio": "/etc/crio/crio.conf"}
_HOOK_FOLDERS = ("/usr/share/containers/oci/hooks.d", "/etc/containers/oci/hooks.d")
_READ_SINCE_PODMAN_5 = "/etc/containers/oci/hooks.d"
ENGINES = ("docker", "containerd", "crio", "podman")
_PROGRAMS = {engine: engine for engine in (*ENGINES, "enroot")} | {
    "docker": "dockerd",
    "charliecloud": "ch-run",
    "nspawn": "systemd-nspawn",
    "lxc": "lxc-start",
}
_OF_PODS = ("containerd", "crio")
# Checks that must succeed before an engine's unknown runtime matters.
REGISTERED = (
    "docker-registered",
    "containerd-registered",
    "crio-registered",
    "podman-hook",
    "podman-runtime",
)
# Names of the vendors' runtimes that read environment variables.
_OTHERS = (
    "nvidia-container-runtime",
    "amd-container-runtime",
    "habana-container-runtime",
    "ascend-docker-runtime",
)


def engine_found(case: Case) -> Iterator[Finding]:
    """Check that there is a container engine, or another program that uses gpuhook."""
    every = [_PROGRAMS[engine] for engine in ([case.engine] if case.engine else ENGINES)]
    found = [program for program in every if _is_here(case, program)]
    found += [] if case.engine else without_daemon.users(case)
    if found:
        yield ok("engines", f"Found {', '.join(found)}")
    elif case.engine:
        yield warning("engines", f"{every[0]} was not found", f"Install {case.engine}")
    else:
        text = f"None of {', '.join(every)} was found"
        yield warning("engines", text, "Install a container engine")


def _is_here(case: Case, program: str) -> bool:
    found = case.machine.which(program, names.SEARCH_PATH) or _runs(case, program)
    return found is not None


def used(case: Case) -> Iterator[Finding]:
    """Check that an engine knows gpu-py; one of several engines is enough.

    CDI specs made by gpuhook serve engines without gpu-py, and Slurm and the like are no engines.
    """
    wanted = _wanted(case)
    if not wanted or {*wanted} & {*case.registered} or is_used(case):
        return
    if not case.engine and without_daemon.users(case):
        return
    if case.unseen:
        text = f"Whether an engine here knows {names.RUNTIME} isn't known"
        why = f"you may not read {', '.join(case.unseen)}"
        yield warning("engines-registered", f"{text}: {why}", "Run the doctor as root")
        return
    # containerd is mostly there for Docker, which chooses its runtime.
    asked = [engine for engine in wanted if engine != "containerd"] or wanted
    text = f"No engine here knows {names.RUNTIME} ({', '.join(asked)})"
    remedy = f"Run gpuhook install --engine {asked[0]}"
    more = f", or with {' or '.join(asked[1:])} if that is what you use" if asked[1:] else ""
    yield warning("engines-registered", text, remedy + more)


def _wanted(case: Case) -> list[str]:
    """Return the engines of which one should know gpu-py: with a kubelet, one for pods."""
    here = [engine for engine in ENGINES if _is_here(case, _PROGRAMS[engine])]
    if case.engine:
        return [case.engine] if case.engine in here else []
    if has_kubelet(case):
        return [engine for engine in here if engine in _OF_PODS] or here
    return here


def has_kubelet(case: Case) -> bool:
    """Tell whether this host is a node of a cluster."""
    return _runs(case, "kubelet") is not None or case.machine.exists("/var/lib/kubelet")


def _runs(case: Case, name: str) -> Process | None:
    return next(iter(case.machine.processes(name)), None)


def containerd(case: Case) -> Iterator[Finding]:
    """Look for the runtime in containerd's configuration and compare with its start time.

    Findings that several containerds share are reported once.
    """
    yield from dict.fromkeys(_containerds(case))


def _containerds(case: Case) -> Iterator[Finding]:
    running = [
        process
        for process in case.machine.processes("containerd")
        if not any("/docker/containerd/" in path for path in process.option("--config", "-c"))
    ]
    for process in running:
        path = (process.option("--config", "-c") or [CONTAINERD_FILE])[-1]
        yield from _one_containerd(case, seen_by(process), path, process)
    if not running and case.machine.which("containerd", names.SEARCH_PATH):
        yield from _one_containerd(case, case.machine, CONTAINERD_FILE, None)


def _one_containerd(
    case: Case, machine: Machine, path: str, running: Process | None
) -> Iterator[Finding]:
    files = [path, *imports(machine, path)]
    install = install_command("containerd", path, [CONTAINERD_FILE])
    yield from distributions.literal(machine, files, install)
    owner = distributions.owner_of(machine, path)
    if owner is not None and (finding := distributions.pending(machine, owner, path)):
        case.registered.append("containerd")
        yield finding
        return
    if found := _too_new(machine, files, running):
        text = f"{found} has a higher configuration version than {path}, which imports it: "
        fix = f"Raise the version of {path} (containerd config migrate), or lower the other one"
        why = "containerd 2.3 and newer don't start then"
        yield failure("containerd-registered", text + why, fix)
        return
    restart = owner.restart if owner else ""
    for finding in _registered(case, machine, "containerd", files, running, restart):
        yield finding
        if owner is not None and finding.check == "containerd-registered":
            yield from distributions.lost(machine, owner, path, install)


def _too_new(machine: Machine, files: list[str], running: Process | None) -> str:
    """Return an imported file because of which containerd doesn't start, "" for none."""
    documents = {path: toml(machine, path)[0] for path in files}
    found = too_new(documents.pop(files[0]), documents, MIGRATES_FILES)
    said = found and (_version(machine, "containerd", running) or version_of(machine, "containerd"))
    return found[0] if said and order(said) >= order("2.3") else ""


def crio(case: Case) -> Iterator[Finding]:
    """Look for the runtime in CRI-O's configuration and compare with its start time."""
    running = _runs(case, "crio")
    if running or case.machine.which("crio", names.SEARCH_PATH):
        machine = seen_by(running) if running else case.machine
        files = [_FILES["crio"], *machine.glob("/etc/crio/crio.conf.d/*")]
        yield from _registered(case, machine, "crio", files, running)


def others_runtimes(case: Case) -> Iterator[tuple[str, str]]:
    """Yield the name and the program of each vendor's own runtime that pods may name."""
    machine = case.machine
    files = [CONTAINERD_FILE, *imports(machine, CONTAINERD_FILE)]
    for path in (*files, _FILES["crio"], *machine.glob("/etc/crio/crio.conf.d/*")):
        for name, program in programs_of(toml(machine, path)[0]):
            ours = is_gpu_py(machine, program)
            if not ours and os.path.basename(program).startswith(_OTHERS):
                yield name, program


def _registered(
    case: Case,
    machine: Machine,
    engine: str,
    files: list[str],
    running: Process | None,
    restart: str = "",
) -> Iterator[Finding]:
    check, install = f"{engine}-registered", install_command(engine, files[0], [_FILES[engine]])
    unseen = [path for path in files if machine.is_closed(path)]
    for path in files:
        tables, problem = toml(machine, path)
        if why := unread(machine, engine, path, _version(machine, engine, running)):
            yield failure(check, f"{path} {why}", "Save it as UTF-8 without a byte order mark")
            return
        if problem:
            text = f"{path} isn't TOML, and {engine} won't start with it: {problem}"
            yield failure(check, text, "Correct the file")
            return
        for name, program in programs_of(tables):
            if not is_gpu_py(machine, program):
                continue
            if not machine.is_program(program):
                text = f"{path} registers {program} as {name}, which can't be executed"
                yield failure(check, text, f"Run {install} again")
                return
            if engine == "containerd" and _is_dropped(case, machine, files[0], running):
                text = (
                    f"{path} registers {program} as {name}, and containerd takes nothing of it: "
                    f"containerd --config {files[0]} config dump doesn't name it"
                )
                yield failure(check, text, f"See what {install} --dry-run warns of")
                return
            case.registered.append(engine)
            yield ok(check, f"{path} registers the runtime {name}: {program}")
            yield from _started_after(machine, engine, path, running, restart)
            return
    if unseen:
        case.unseen.extend(unseen)
        yield closed(engine, unseen[0])
    else:
        text = f"{engine} doesn't know the runtime {names.RUNTIME} ({files[0]})"
        yield note(f"{engine}-unused", text, f"If {engine} is to use it: {install}")


def _is_dropped(case: Case, machine: Machine, path: str, running: Process | None) -> bool:
    """Ask containerd whether it drops gpuhook's part of a configuration file and its imports.

    The effective table, of several versions, differs between containerd's versions. False
    if it can't be asked, as for files that it sees in another mount namespace.
    """
    if machine.root != case.machine.root:
        return False
    found = machine.which("containerd", names.SEARCH_PATH) or ""
    program = f"/proc/{running.pid}/exe" if running else found
    words = ("--config", machine.path(path), "config", "dump")
    said = output(machine, program, *words, name="containerd")
    try:
        tables = tomllib.loads(said.decode("utf-8"))
    except ValueError:
        return False
    taken = (is_gpu_py(machine, each) for _, each in programs_of(tables))
    return bool(tables) and not any(taken)


def _version(machine: Machine, engine: str, running: Process | None) -> str:
    """Return the version of a running engine, "" if the installed one applies."""
    if running is None or machine.root:
        return ""
    said = output(machine, f"/proc/{running.pid}/exe", "--version", name=engine)
    return version_in(said)


def _started_after(
    machine: Machine, engine: str, path: str, running: Process | None, restart: str = ""
) -> Iterator[Finding]:
    """Neither daemon can be asked, but both read their files only when they start."""
    check, status = f"{engine}-loaded", machine.stat(path)
    restart = restart or f"systemctl restart {engine}"
    if not running:
        yield ok(check, f"{engine} doesn't run; it will read the file when it starts")
    elif status is None or not running.started:
        text = f"When {engine} started is unknown, and so whether it has read {path}"
        yield warning(check, text, f"Run {restart} if in doubt")
    elif status.st_mtime > running.started + START_PRECISION:
        text = f"{path} is newer than the running {engine}, which hasn't read it"
        yield failure(check, text, f"Run {restart}")
    else:
        yield ok(check, f"The running {engine} started after {path} was written")


def podman(case: Case) -> Iterator[Finding]:
    """Look for the runtime and the hook in podman's files, which it reads at every start."""
    if not case.machine.which("podman", names.SEARCH_PATH):
        return
    found = list(_podman_hooks(case))
    for path in podman_files(case):
        found += _podman_runtimes(case.machine, path)
    yield from found
    if any(finding.check == "podman-runtime" for finding in found):
        yield from _podman_low_level(case)
    if found:
        case.registered.append("podman")
    else:
        yield note(
            "podman-unused",
            f"podman knows neither the runtime {names.RUNTIME} nor the hook {names.HOOK}",
            "If podman is to use them: gpuhook install --engine podman",
        )


def _podman_runtimes(machine: Machine, path: str) -> Iterator[Finding]:
    """Check gpuhook's runtimes in one file; podman uses the first existing program."""
    check = "podman-runtime"
    tables, problem = toml(machine, path)
    if why := unread(machine, "podman", path):
        yield failure(check, f"{path} {why}", "Save it as UTF-8 without a byte order mark")
    if problem:
        text = f"{path} isn't TOML, and podman doesn't start with it: {problem}"
        yield failure(check, text, "Correct the file")
    for name, programs in table(table(tables, "engine"), "runtimes").items():
        ours = [program for program in strings(programs) if is_gpu_py(machine, program)]
        if any(map(machine.is_program, ours)):
            yield ok(check, f"{path} registers the runtime {name}")
        elif ours:
            text = f"{path} registers {ours[0]} as {name}, which can't be executed"
            yield failure(check, text, "Run gpuhook install --engine podman again")


def _podman_low_level(case: Case) -> Iterator[Finding]:
    """Check that gpu-py calls podman's own low-level runtime, unless config.toml names some."""
    engines = [table(toml(case.machine, path)[0], "engine") for path in podman_files(case)]
    every = [pair for each in engines for pair in table(each, "runtimes").items()]
    ours = [
        (name, "")
        for name, paths in every
        if any(map(partial(is_gpu_py, case.machine), strings(paths)))
    ]
    own = own_runtime(engines, EngineRequest(tuple(ours), prefix=case.machine.root))
    passed = monitor_variables(engines, "")
    if own and not case.config.names_runtimes and f"{names.ENGINES_RUNTIME}={own}" not in passed:
        text = f"podman itself calls {own}, and gpu-py may call another low-level runtime"
        yield note("podman-low-level", text, "To keep podman's: gpuhook install --engine podman")


def podman_files(case: Case) -> list[str]:
    """Return podman's configuration files, including the user's own if not root."""
    files = ["/usr/share/containers/containers.conf", *case.settings("containers/containers.conf")]
    return [name for path in files for name in (path, *case.machine.glob(f"{path}.d/*.conf"))]


def _podman_hooks(case: Case) -> Iterator[Finding]:
    named = []
    for path in podman_files(case):
        more = strings(table(toml(case.machine, path)[0], "engine").get("hooks_dir"))
        named += [os.path.normpath(folder) for folder in more]
    for folder in dict.fromkeys((*_HOOK_FOLDERS, *named)):
        for name in case.machine.names(folder):
            if name.endswith(".json"):
                is_new = folder == _READ_SINCE_PODMAN_5 and folder not in named
                yield from _podman_hook(case, f"{folder}/{name}", is_new)


def _podman_hook(case: Case, path: str, needs_podman_5: bool) -> Iterator[Finding]:
    """Check one hook file; one in a folder that only podman 5 reads may not be read at all."""
    if case.machine.is_closed(path):
        case.unseen.append(path)
        yield closed("podman", path)
        return
    try:
        # podman's reader supports neither a byte order mark nor another encoding.
        described = json.loads(case.machine.data(path).decode("utf-8"))
        program = jsontext.field(described, "hook")  # podman and CRI-O read keys in any case
        if isinstance(program, dict):
            program = jsontext.field(program, "path")
        if program is None:
            raise KeyError("hook")
        is_usable = case.machine.is_program(str(program))
        stages = strings(jsontext.field(described, "stages"))
    except (ValueError, AttributeError, KeyError) as error:
        text = f"{path} isn't an OCI hook file, and every container fails because of it: {error!r}"
        yield failure("podman-hook", text, "Correct or delete the file")
        return
    if not is_usable:
        text = f"{path} names the hook {program}, which can't be executed; every container fails"
        yield failure("podman-hook", text, "Reinstall the hook, or delete the file")
    elif os.path.basename(str(program)) != names.HOOK:
        return
    elif os.path.dirname(path) in _HOOK_FOLDERS and "precreate" in stages:
        text = f"{path} has the stage precreate, at which every podman build and buildah fails"
        remedy = "Run gpuhook install --engine podman, which moves it to where builds don't look"
        yield warning("podman-hook", text, remedy)
    else:
        yield _read_hook(case, path, f"{path} registers {program}", needs_podman_5)


def _read_hook(case: Case, path: str, text: str, needs_podman_5: bool) -> Finding:
    version = version_of(case.machine, "podman") if needs_podman_5 else ""
    folder = os.path.dirname(path)
    if needs_podman_5 and not version:
        text += "; podman before 5.0 reads this folder only if hooks_dir names it"
    elif needs_podman_5 and int(version.partition(".")[0]) < 5:
        return warning(
            "podman-hook",
            f"podman {version} doesn't read {path}: podman before 5.0 looks into {folder} "
            "only if hooks_dir names it",
            f"Add {folder} to hooks_dir in containers.conf, as gpuhook install --engine podman "
            "--hook precreate does",
        )
    return ok("podman-hook", text)

"""Docker: the runtimes in daemon.json.

Source: dockerd(8), "Daemon configuration file" and "Configuration reload behavior".
"""

import glob
import json
import os
import shlex
import shutil
import signal
import time
from collections.abc import Callable, Container
from dataclasses import replace
from functools import partial

from gpuhook.base import names as our_names
from gpuhook.base.errors import EngineError, shown
from gpuhook.base.oci import jsontext
from gpuhook.monitor.host import processes as host_processes
from gpuhook.monitor.host import systemctl
from gpuhook.monitor.host.processes import Process
from gpuhook.tools.engines import (
    docker_api,
    installed,
    json_text,
    managed,
    marks,
    placeholders,
    swarm,
)
from gpuhook.tools.engines.ask import (
    CDI,
    NVIDIAS_NAME,
    SET_DEFAULT,
    SWARM,
    Engine,
    EngineChanges,
    EngineRequest,
)
from gpuhook.tools.engines.docker_api import DEFAULT_CONFIG
from gpuhook.tools.engines.files import Change, decode, read, read_json, read_text, remove_folders
from gpuhook.tools.engines.merge import Document, Path, get
from gpuhook.tools.engines.store import TargetFile

_DATA = "/var/lib/docker"
# Settings that a reload changes only if the file contains them, with dockerd's defaults.
_BUILT_IN: Document = {"runtimes": {}, "default-runtime": "runc"}
_KEEPS_DEFAULT = "Restart Docker, which keeps a default runtime that its file no longer names: "
# Settings that dockerd accepts as an option or in its file; it doesn't start with both.
_OPTIONS = {
    "default-runtime": "--default-runtime",
    "features": "--feature",
    swarm.KEY: "--node-generic-resource",
}
_RELOAD_S = 15.0  # timeout for dockerd's reload, which takes a fraction of a second
_POLL = 0.05
_ROOT = 0


class Docker(Engine):
    """dockerd, rootful or rootless."""

    name = "docker"

    def install(self, ask: EngineRequest) -> EngineChanges:
        """Merge the runtimes into daemon.json, and keep all other settings."""
        managed.check_system(self.name, ask.system)
        path = self._config(ask)
        data = read(path)
        marks.check(self.name, path, data, lambda: installed.version(self.name, ask.prefix))
        text = decode(data or b"", path)
        document = _document(text, path)
        ask = _by_link(ask).beside(_foreign(document, ask, path))
        wanted = wanted_document(document, ask, path)
        _check_options(wanted.keys() - document.keys(), path)
        owned: tuple[Path, ...] = tuple(("runtimes", name) for name in ask.names)
        foreign = _taken_by_others(document, ask, path)
        released = tuple(each for each in _released(document, ask) if each not in foreign)
        edited = json_text.edited(text, wanted, path)
        target = TargetFile(
            self.name, path, "json", edited, path, owned, released=released, foreign=foreign
        )
        new = {key for key in ("features", swarm.KEY) if wanted.get(key) != document.get(key)}
        new |= {key for key, *_ in released if key in ("features", swarm.KEY)}
        if ask.cdi and ask.cdi_setting:
            new.add("features")  # it may be in the file already, ignored by an older dockerd
        advice = [self._advice(path, sorted(new), ask)]
        if ("default-runtime",) in released:
            new.add("default-runtime")
            others = advice if len(new) > 1 else []
            advice = [f"{_KEEPS_DEFAULT}{restart_command(path)}", *others]
        return EngineChanges((target,), tuple(advice), _warnings(ask), restart=bool(new))

    def _config(self, ask: EngineRequest) -> str:
        if ask.config:
            return ask.config
        return ask.user("docker/daemon.json") if ask.rootless else ask.system(DEFAULT_CONFIG)

    def _advice(self, path: str, at_start: list[str], ask: EngineRequest) -> str:
        if at_start:
            what = " and ".join(at_start)
            return f"Restart Docker, which reads {what} only at start-up: {restart_command(path)}"
        daemons = _daemons(path)
        if daemons:
            reload = systemctl.command_for("reload", self.name, daemons)
            reload = reload or f"kill -HUP {' '.join(str(daemon.pid) for daemon in daemons)}"
            return f"Reload Docker: {reload} (or run this again with --reload)"
        others = [docker_api.config_of(daemon) for daemon in host_processes.running("dockerd")]
        if others and not (ask.config or ask.prefix):
            again = f"gpuhook install --engine docker --config {shlex.quote(others[0])}"
            return f"The running Docker reads another file: to add gpu-py there, run {again}"
        return "No running Docker reads this file: it takes effect when Docker starts"

    def afterwards(self, config: str = "") -> str:
        """Return the step that makes dockerd read the restored daemon.json."""
        command = restart_command(config)
        return f"Restart Docker, if it is running, so that it drops the runtime: {command}"

    def reload(self, config: str) -> list[int]:
        """Send SIGHUP to each of our dockerds that reads this daemon.json.

        Return when their runtimes are those of the file. EngineError if one keeps others.
        """
        said = json_text.parse(read_text(config) or "", config)
        sent = _have_read_again(config)
        if problem := _wait_until_none(config, partial(_still_missing, document=said)):
            raise EngineError(
                problem,
                "See its log for the reason: journalctl --unit docker; then restart Docker",
            )
        return sent

    def forget(self, change: Change, names: tuple[str, ...]) -> list[int]:
        """Make running daemons drop the runtimes before daemon.json is changed.

        When dockerd reloads a file without "runtimes", it keeps its current ones, and likewise
        the default. So the file contains both until dockerd has reloaded it. EngineError, with
        everything unchanged, if a daemon keeps them.
        """
        text = decode(change.new or b"", change.path)
        document = json_text.parse(text, change.path)
        _check_default(document, names, change.path)
        daemons = _daemons(change.path)
        if not daemons:
            return []
        options = {key for key in _OPTIONS if any(each.option(_OPTIONS[key]) for each in daemons)}
        built_in = {key: value for key, value in _BUILT_IN.items() if key not in options}
        # protects: docker-forgets
        edited = json_text.edited(text, {**built_in, **document}, change.path)
        said = marks.encoded(edited, change.new)
        made = Change(change.path, change.old, said).commit()
        try:
            _have_read_again(change.path)
            problem = _wait_until_none(change.path, partial(_still_known, names=names))
        finally:
            Change(change.path, said, change.old).commit()
            remove_folders(made)
        if problem:
            _have_read_again(change.path)
            raise EngineError(
                problem,
                "Run gpuhook uninstall --engine docker && systemctl restart docker, "
                "which stops containers unless live-restore is on",
            )
        return [daemon.pid for daemon in daemons]

    def bound(self, names: tuple[str, ...], ask: EngineRequest) -> list[str]:
        """Return the containers, running or not, whose runtime is one of ``names``."""
        config = self._config(ask)
        folders = [glob.escape(root) + "/containers/*" for root in _data_roots(config, ask)]
        return [
            _name_of(folder)
            for pattern in folders
            for folder in sorted(glob.glob(pattern))
            if read_json(os.path.join(folder, "hostconfig.json")).get("Runtime") in names
        ]

    def is_present(self, ask: EngineRequest) -> bool:
        """Tell whether dockerd or its configuration is installed."""
        return bool(shutil.which("dockerd")) or os.path.exists(self._config(ask))

    def is_users(self, ask: EngineRequest) -> bool:
        """Tell whether the user runs a rootless Docker, or has set one up.

        Source: dockerd-rootless-setuptool.sh, which writes a user unit.
        """
        signs = (self._config(ask), ask.user("systemd/user/docker.service"))
        return any(map(os.path.exists, signs)) or bool(host_processes.running("dockerd"))


def _by_link(ask: EngineRequest) -> EngineRequest:
    """Return the settings with a link's path for the runtime ``nvidia``, if there is a link.

    The dev containers' command line looks for NVIDIA's name in the path.
    """
    also = tuple((name, ask.links[-1] if ask.links else program) for name, program in ask.also)
    return replace(ask, also=also)


def _warnings(ask: EngineRequest) -> tuple[str, ...]:
    """Return a warning if a user configures a rootless Docker while root's Docker is running."""
    if not ask.rootless or ask.config or host_processes.running("dockerd"):
        return ()
    if not host_processes.running("dockerd", users=(_ROOT,), unseen=True):
        return ()
    who = "The running Docker is root's, and this changed only your rootless Docker"
    return (f"{who}: for root's Docker, run gpuhook install --engine docker as root",)


def restart_command(config: str) -> str:
    """Return how to restart the dockerd that reads a file, or else the caller's Docker.

    It is systemd's command, unless a running dockerd isn't a unit of systemd.
    """
    daemons = _daemons(config)
    usual = f"systemctl {'--user ' if os.geteuid() else ''}restart docker"
    if not daemons:
        return usual
    found = systemctl.command_for("restart", Docker.name, daemons)
    pids = " ".join(str(daemon.pid) for daemon in daemons)
    return found or f"kill {pids}, then start dockerd as before"


def wanted_document(document: Document, ask: EngineRequest, path: str) -> Document:
    """Return the wanted daemon.json."""
    runtimes = dict(_table(document, "runtimes", path))
    moved = ask.moved(_programs(runtimes))
    for name, program in _programs(runtimes).items():
        if program in moved and name not in ask.names:
            runtimes[name] = _led(runtimes[name], moved[program])
    for name, program in ask.runtimes:
        if name == "runc":
            raise EngineError(
                "Docker reserves the runtime name runc", "Choose another --runtime-name"
            )
        also = ask.links if name == NVIDIAS_NAME and ask.leads else ()
        if program_of(runtimes.get(name)) not in (program, *also):
            runtimes[name] = {"path": program}
    wanted = {**document, "runtimes": runtimes}
    if ask.swarm:
        wanted[swarm.KEY] = swarm.SwarmNode(node_resources(document, path), ask.swarm).merged()
    if ask.set_default or ask.swarm:  # a service can't choose a runtime
        wanted["default-runtime"] = ask.names[0]
    if ask.cdi:
        features = _table(document, "features", path)
        if ask.cdi_setting or "cdi" in features:  # the newer --cdi overrides a false, too
            wanted["features"] = {**features, "cdi": True}
    return wanted


def _programs(runtimes: Document) -> dict[str, str]:
    """Return the programs of a table of runtimes by name."""
    found = {name: program_of(entry) for name, entry in runtimes.items()}
    return {name: path for name, path in found.items() if path is not None}


def program_of(entry: object) -> str | None:
    """Return the program of a runtime in daemon.json, None if it has none.

    dockerd reads a runtime's fields with Go's encoding/json, which ignores case. It refuses the
    file's top-level keys in another case, and names of runtimes and features are case-sensitive.
    """
    path = jsontext.field(entry, "path") if isinstance(entry, dict) else None
    return path if isinstance(path, str) else None


def _led(entry: Document, program: str) -> Document:
    """Return a copy of a runtime with another program."""
    return {
        key: program if jsontext.folded(key) == "path" else value for key, value in entry.items()
    }


def _released(document: Document, ask: EngineRequest) -> tuple[Path, ...]:
    """Return the settings to restore; their original values are recorded."""
    paths: list[Path] = [("runtimes", name) for name in ask.dropped]
    if SET_DEFAULT in ask.without and document.get("default-runtime") in _ours(document, ask):
        paths.append(("default-runtime",))
    paths += [(swarm.KEY,)] if SWARM in ask.without else []
    paths += [("features", "cdi")] if CDI in ask.without else []
    return tuple(path for path in paths if get(document, path) is not None)


def _ours(document: Document, ask: EngineRequest) -> set[str]:
    """Return the names of our runtimes, including those with a former path of our program."""
    runtimes = document.get("runtimes", {})
    programs = _programs(runtimes if isinstance(runtimes, dict) else {})
    moved = ask.moved(programs)
    ours = {program for _, program in ask.runtimes} | {*moved, *ask.links}
    return {name for name, program in programs.items() if program in ours}


def node_resources(document: Document, path: str) -> list[str]:
    """Return the node-generic-resources of a daemon.json."""
    value = document.get(swarm.KEY, [])
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        raise EngineError(
            f'"{swarm.KEY}" in {path} isn\'t a list of strings',
            "Correct it and run this again; the file was not changed",
        )
    return value


def _document(text: str, path: str) -> Document:
    """Return the content of a daemon.json; EngineError if it is a template, or no JSON.

    Docker itself replaces text in braces in log options.
    """
    try:
        document = json_text.parse(text, path)
    except EngineError:
        placeholders.check(Docker.name, path, text)
        raise
    own = json.dumps(document.get("log-opts"), ensure_ascii=False)
    placeholders.check(Docker.name, path, text, own)
    return document


def _foreign(document: Document, ask: EngineRequest, path: str) -> set[str]:
    """Return the names of the runtimes that aren't ours."""
    return set(_table(document, "runtimes", path)) - _ours(document, ask)


def _taken_by_others(document: Document, ask: EngineRequest, path: str) -> tuple[Path, ...]:
    """Return the path of NVIDIA's runtime if it has another program than ours."""
    program = _programs(_table(document, "runtimes", path)).get(NVIDIAS_NAME)
    if program is None or program in ask.links or os.path.basename(program) == our_names.RUNTIME:
        return ()
    return (("runtimes", NVIDIAS_NAME),) if NVIDIAS_NAME in _foreign(document, ask, path) else ()


def _table(document: Document, key: str, path: str) -> Document:
    value = document.get(key, {})
    if not isinstance(value, dict):
        raise EngineError(
            f'"{key}" in {path} isn\'t a JSON object',
            "Correct it and run this again; the file was not changed",
        )
    return value


def _check_default(document: Document, names: tuple[str, ...], path: str) -> None:
    """Refuse to remove a runtime that others have made the default in a daemon.json."""
    default = document.get("default-runtime")
    if default in names and default not in _table(document, "runtimes", path):
        raise EngineError(
            f'"default-runtime" in {path} is {default}, and gpuhook install didn\'t set it',
            "Set it to runc there and run this again; the file was not changed",
        )


def _check_options(new: Container[str], path: str) -> None:
    """Refuse a new setting in the file that a running dockerd also has as an option."""
    for daemon in _daemons(path):
        for key, option in _OPTIONS.items():
            if key in new and daemon.option(option):  # protects: dockers-options
                raise EngineError(
                    f"The running dockerd {daemon.pid} has the option {option}, and wouldn't start "
                    f'with "{key}" in {path} too',
                    "Remove the option from Docker's unit (systemctl cat docker), restart "
                    "Docker and run this again",
                )


def _daemons(config: str) -> list[Process]:
    """Return our running dockerds that read a configuration file."""
    return [
        daemon
        for daemon in host_processes.running("dockerd")
        if daemon.reads(docker_api.config_of(daemon), config)
    ]


def _have_read_again(config: str) -> list[int]:
    """Send SIGHUP to the running dockerds that read a configuration file; return their ids."""
    found = _daemons(config)
    return [daemon.pid for daemon in found if host_processes.send(daemon, signal.SIGHUP)]


def _wait_until_none(config: str, problem_of: Callable[[docker_api.DockerInfo], str]) -> str:
    """Return "" once no running daemon has a problem, else a remaining problem."""
    end = time.monotonic() + _RELOAD_S
    while True:
        answers = docker_api.asked(_daemons(config))
        problems = [problem for answer in answers if (problem := problem_of(answer))]
        if not problems or time.monotonic() > end:
            return problems[0] if problems else ""
        time.sleep(_POLL)


def _still_missing(answer: docker_api.DockerInfo, document: Document) -> str:
    """Return the setting that a daemon hasn't loaded yet, "" if it can't be asked."""
    if answer.info is None:
        return ""
    who = f"The running dockerd {answer.process.pid} doesn't load"
    missing = {*_programs(document.get("runtimes", {})).items()} - {*answer.runtimes.items()}
    if missing:
        return f"{who} the runtime {shown(min(missing)[0])} from {answer.config_path}"
    default = document.get("default-runtime", answer.default_runtime)
    return "" if default == answer.default_runtime else f"{who} its new default runtime"


def _still_known(answer: docker_api.DockerInfo, names: tuple[str, ...]) -> str:
    who = f"The running dockerd {answer.process.pid}"
    if answer.info is None:
        return f"{who} couldn't be asked whether it still has the runtime: {answer.problem}"
    if answer.default_runtime in names:
        return f"{who} keeps {answer.default_runtime} as its default runtime"
    known = [name for name in names if name in answer.runtimes]
    return f"{who} keeps the runtime {known[0]}" if known else ""


def _data_roots(config: str, ask: EngineRequest) -> list[str]:
    document = json_text.parse(read_text(config) or "", config)
    configured = str(document.get("data-root") or document.get("graph") or ask.system(_DATA))
    roots = [
        daemon.root + (daemon.option("--data-root") or [configured])[-1]
        for daemon in _daemons(config)
    ]
    return list(dict.fromkeys(roots or [configured]))


def _name_of(folder: str) -> str:
    name = read_json(os.path.join(folder, "config.v2.json")).get("Name")
    return name.removeprefix("/") if isinstance(name, str) else os.path.basename(folder)[:12]

"""Selection of containerd's configuration file, and the version of the containerd that reads it.

Kubernetes distributions have their own containerd with its own file.
"""

import contextlib
import os
import re
import shlex
import shutil
from collections.abc import Iterator

from gpuhook.base.errors import EngineError, UntrustedPathError
from gpuhook.base.host import files as host_files
from gpuhook.monitor.host import processes as host_processes
from gpuhook.tools.engines import distributions, installed, toml_text
from gpuhook.tools.engines.ask import EngineRequest
from gpuhook.tools.engines.containerd_settings import ENGINE, Version, disables_cri
from gpuhook.tools.engines.distributions import Distribution
from gpuhook.tools.engines.files import read_text

USUAL = "/etc/containerd/config.toml"
DOCKERS = "/docker/containerd/"  # part of the path of a file that dockerd writes for containerd


def text_of(path: str) -> str | None:
    """Return a file's text, None if there is no such file."""
    return read_text(path)


def distribution(path: str) -> Distribution | None:
    """Return the distribution that writes a file, None if the administrator does."""
    return distributions.of_file(path, text_of)


def restart(path: str) -> str:
    """Return the step that makes a file's containerd read it again."""
    owner = distribution(distributions.main_file(path, text_of))
    command = "systemctl restart containerd" if owner is None else owner.restart
    return f"Restart containerd, if it is running (containers continue to run): {command}"


def chosen(ask: EngineRequest) -> str:
    """Return the main file to change: the named one, or that of a running containerd.

    EngineError if several containerds run, and none reads the default file.
    """
    if ask.config:
        return distributions.main_file(ask.config, text_of)
    usual = ask.system(USUAL)
    found = [*dict.fromkeys(path for path in _read(ask) if _has_cri(path))]
    if usual in found:
        return usual
    if len(found) > 1:
        commands = " or ".join(map(_command, found))
        raise EngineError(
            f"Several containerds are running, and none of them reads {usual}",
            f"Name the file of one: {commands}",
        )
    if found:
        return found[0]
    there = [*_distributions(ask)]
    is_usual = os.path.exists(usual) or not (ask.prefix or shutil.which(ENGINE) is None)
    return there[0] if len(there) == 1 and not is_usual else usual


def _distributions(ask: EngineRequest) -> Iterator[str]:
    """Yield the files of installed distributions; links below a prefix don't lead out of it."""
    for each in distributions.ALL:
        with contextlib.suppress(EngineError):
            path = ask.system(each.read)
            if os.path.isdir(os.path.dirname(path)):
                yield path


def others(path: str, ask: EngineRequest) -> list[str]:
    """Return messages about distributions whose own containerd reads another file."""
    found = {} if ask.config else {each: distribution(each) for each in _read(ask)}
    return [
        f"{owner.name} has its own containerd, which reads {each}: for that one, run "
        f"{_command(each)}"
        for each, owner in found.items()
        if owner is not None and each != path
    ]


def _command(path: str) -> str:
    return f"gpuhook install --engine {ENGINE} --config {shlex.quote(path)}"


def _read(ask: EngineRequest) -> Iterator[str]:
    """Yield the files of running containerds, except those started by dockerd."""
    for process in [] if ask.prefix else host_processes.running(ENGINE):
        path = (process.option("--config", "-c") or [USUAL])[-1]
        if DOCKERS not in path and os.path.isabs(path) and not process.root:
            yield path


def _has_cri(path: str) -> bool:
    return not disables_cri(toml_text.parse(read_text(path) or "", path))


def is_here(path: str) -> bool:
    """Tell whether containerd or its configuration file is on this host."""
    return shutil.which(ENGINE) is not None or os.path.exists(path)


def version_for(path: str) -> Version:
    """Return the version of the containerd that reads a file, None if unknown."""
    owner = distribution(path)
    found = installed.version(ENGINE) if owner is None else _version_of(owner.program_for(path))
    match = re.match(r"(\d+)\.(\d+)\.", found or "")
    return (int(match[1]), int(match[2])) if match else None


def _version_of(program: str) -> str | None:
    try:
        host_files.check_writers(program)  # protects: own-containerd
    except UntrustedPathError:
        return None
    return installed.version_of(program)

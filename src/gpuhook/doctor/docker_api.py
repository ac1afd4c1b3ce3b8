"""Ask running Docker daemons what they have loaded: GET /info on their unix sockets."""

import http.client
import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gpuhook.doctor.machine import Machine, Process

DEFAULT_CONFIG = "/etc/docker/daemon.json"
_DEFAULT_SOCKET = "/var/run/docker.sock"
_PATIENCE = 5.0  # seconds


@dataclass(frozen=True)
class DockerInfo:
    """One running dockerd; ``info`` is None where it can't be asked, ``problem`` says why."""

    process: Process
    config_path: str
    socket_path: str
    info: dict[str, Any] | None
    problem: str

    @property
    def runtimes(self) -> dict[str, str]:
        """The loaded runtimes: name -> path."""
        loaded = (self.info or {}).get("Runtimes") or {}
        return {name: str(entry.get("path", "")) for name, entry in loaded.items()}


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=_PATIENCE)
        self._path = path

    def connect(self) -> None:
        """Connect to the socket."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(_PATIENCE)
        self.sock.connect(self._path)


def ask(path: str) -> dict[str, Any]:
    """Return what GET /info answers on a socket; OSError or ValueError if nothing usable."""
    connection = _UnixConnection(path)
    try:
        connection.request("GET", "/info")
        response = connection.getresponse()
        body = response.read()
        if response.status != http.client.OK:
            raise OSError(f"it answers {response.status} {response.reason}")
        answer = json.loads(body)
    except http.client.HTTPException as error:
        raise OSError(f"it doesn't speak HTTP: {error!r}") from None
    finally:
        connection.close()
    if not isinstance(answer, dict):
        raise OSError("it answers something else than an object")
    return answer


def running_dockers(machine: Machine) -> Iterator[DockerInfo]:
    """Yield every dockerd of this machine, asked."""
    for process in machine.processes("dockerd"):
        config = (process.option("--config-file") or [_default_config(process)])[-1]
        path = _socket_of(process, config)
        try:
            yield DockerInfo(process, config, path, ask(process.machine.path(path)), "")
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            yield DockerInfo(process, config, path, None, reason)


def _default_config(process: Process) -> str:
    """Return where dockerd looks for its settings: in the user's home where it is rootless."""
    environment = process.environment or {}
    if process.uid == 0 or "HOME" not in environment:
        return DEFAULT_CONFIG
    folder = environment.get("XDG_CONFIG_HOME") or f"{environment['HOME']}/.config"
    return f"{folder}/docker/daemon.json"


def _socket_of(process: Process, config: str) -> str:
    hosts = process.option("-H", "--host")
    try:
        listed = json.loads(process.machine.text(config) or "{}").get("hosts", [])
    except (ValueError, AttributeError):
        listed = []
    for host in (*hosts, *listed):
        if isinstance(host, str) and host.startswith("unix://"):
            return host.removeprefix("unix://")
    runtime_dir = (process.environment or {}).get("XDG_RUNTIME_DIR")
    return f"{runtime_dir}/docker.sock" if process.uid != 0 and runtime_dir else _DEFAULT_SOCKET

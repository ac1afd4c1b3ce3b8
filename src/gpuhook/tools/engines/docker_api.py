"""Client of running Docker daemons: loaded settings, containers and images.

It uses GET /info, /containers/json, /containers/ID/json and /images/NAME/json on their sockets.

The peer must be root or the current user. Its answer is limited to a few seconds and megabytes.
"""

import json
import os
import socket
import struct
import time
import urllib.parse
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from gpuhook.base.host import files as host_files
from gpuhook.monitor.host.processes import Process

DEFAULT_CONFIG = "/etc/docker/daemon.json"
_DEFAULT_SOCKET = "/var/run/docker.sock"
_REQUEST = "GET {} HTTP/1.0\r\nHost: docker\r\n\r\n"  # 1.0: the answer ends with the connection
_OK = "200"
_PATIENCE = 5.0  # seconds for the whole answer
_MAX_BYTES = 4 << 20  # bytes; a typical answer has 5,000
_PIECE = 1 << 16
_CREDENTIALS = struct.Struct("3i")  # struct ucred of unix(7): process, user, group
_ROOT = 0


@dataclass(frozen=True)
class DockerInfo:
    """A running dockerd; ``info`` is None if it can't be asked, ``problem`` gives the reason."""

    process: Process
    config_path: str
    socket_path: str
    info: dict[str, Any] | None
    problem: str

    @property
    def runtimes(self) -> dict[str, str]:
        """The loaded runtimes: name -> path."""
        return runtimes_of(self.info or {})

    @property
    def default_runtime(self) -> str:
        """The default runtime's name, "" if unknown."""
        return str((self.info or {}).get("DefaultRuntime", ""))


def ask(path: str, patience: float = _PATIENCE) -> dict[str, Any]:
    """Return the answer to GET /info on a socket; OSError or ValueError if unusable."""
    answer = _get(path, "/info", patience)
    if not isinstance(answer, dict):
        raise OSError("its answer isn't an object")
    return answer


def runtimes_of(info: dict[str, Any]) -> dict[str, str]:
    """Return the loaded runtimes, name -> path, from a result of ``ask``."""
    loaded = info.get("Runtimes")
    return {
        name: str(entry.get("path", ""))
        for name, entry in (loaded.items() if isinstance(loaded, dict) else ())
        if isinstance(entry, dict)
    }


def sockets(processes: Iterable[Process]) -> list[str]:
    """Return the sockets of dockerds."""
    return [process.root + _socket_of(process, config_of(process)) for process in processes]


def containers(path: str, patience: float) -> list[dict[str, Any]]:
    """Return the running containers within a time limit; OSError or ValueError as ``ask``."""
    answer = _get(path, "/containers/json", patience)
    return [each for each in answer if isinstance(each, dict)] if isinstance(answer, list) else []


def container(path: str, name: str, patience: float) -> object:
    """Return a container's description; OSError or ValueError as ``ask``, and if it is gone."""
    return _get(path, f"/containers/{urllib.parse.quote(name, safe='')}/json", patience)


def image(path: str, name: str, patience: float) -> object:
    """Return an image's description; OSError or ValueError as ``ask``, and if it is absent."""
    return _get(path, f"/images/{urllib.parse.quote(name, safe='/:@')}/json", patience)


def _get(path: str, what: str, patience: float) -> object:
    head, _, body = _talk(path, _REQUEST.format(what).encode(), patience).partition(b"\r\n\r\n")
    words = head.partition(b"\r\n")[0].decode("ascii", "replace").split(" ", 2)
    if not words[0].startswith("HTTP/") or len(words) < 2:
        raise OSError("it doesn't speak HTTP")
    if words[1] != _OK:
        raise OSError(f"it answers {' '.join(words[1:])}")
    try:
        answer: object = json.loads(body)
    except RecursionError:
        answer = None
    return answer


def _talk(path: str, request: bytes, limit: float) -> bytes:
    """Return the answer, if it is in time, within the limit, and from root or our user."""
    end = time.monotonic() + limit
    data = bytearray()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(limit)
        connection.connect(path)
        _check_peer(connection)  # protects: docker-peer
        connection.sendall(request)
        while (patience := end - time.monotonic()) > 0:  # protects: docker-patience
            connection.settimeout(patience)
            piece = connection.recv(_PIECE)
            if not piece:
                return bytes(data)
            data += piece
            if len(data) > _MAX_BYTES:  # protects: docker-bound
                raise OSError(f"it answers more than {_MAX_BYTES >> 20} MiB")
    raise TimeoutError(f"it doesn't finish its answer within {limit:.0f} seconds")


def _check_peer(connection: socket.socket) -> None:
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user = _CREDENTIALS.unpack(data)[1]
    if user not in (_ROOT, os.geteuid()):
        raise OSError(f"its socket belongs to user {user}")


def asked(processes: Iterable[Process]) -> Iterator[DockerInfo]:
    """Yield each dockerd with its answer."""
    for process in processes:
        config = config_of(process)
        path = _socket_of(process, config)
        try:
            yield DockerInfo(process, config, path, ask(process.root + path), "")
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            yield DockerInfo(process, config, path, None, reason)


def config_of(process: Process) -> str:
    """Return the path of a dockerd's configuration; for a rootless one in the user's home."""
    given = process.option("--config-file")
    if given:
        return given[-1]
    environment = process.environment or {}
    if process.uid == _ROOT or "HOME" not in environment:
        return DEFAULT_CONFIG
    folder = environment.get("XDG_CONFIG_HOME") or f"{environment['HOME']}/.config"
    return f"{folder}/docker/daemon.json"


def _socket_of(process: Process, config: str) -> str:
    hosts = process.option("-H", "--host")
    try:
        listed = json.loads(host_files.read(process.root + config)).get("hosts", [])
    except (OSError, ValueError, AttributeError):
        listed = []
    for host in (*hosts, *listed):
        if isinstance(host, str) and host.startswith("unix://"):
            return host.removeprefix("unix://")
    runtime_dir = (process.environment or {}).get("XDG_RUNTIME_DIR")
    if process.uid != _ROOT and runtime_dir:
        return f"{runtime_dir}/docker.sock"
    return _DEFAULT_SOCKET

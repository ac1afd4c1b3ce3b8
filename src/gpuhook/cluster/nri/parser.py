"""Parsing of engines' messages in a process without privileges.

The texts in a request come from tenants, and a general-purpose parser in C reads them. So it runs
as the user nobody, without files, sockets or children. It returns the few fields that the plugin
uses, and the root process checks their types.
"""

import json
import os
import resource
import select
import signal
import socket
import struct
import time
from dataclasses import dataclass
from typing import Any, NoReturn

from gpuhook.base.cgroup.access import in_first_user_namespace
from gpuhook.base.container import kernel
from gpuhook.base.errors import PluginError
from gpuhook.base.fileio import write_all
from gpuhook.base.host import signals
from gpuhook.cluster.nri.asked import LONGEST, ContainerRequest, Pairs
from gpuhook.cluster.nri.messages import nri, ttrpc
from gpuhook.monitor.host.child import how_ended
from gpuhook.monitor.kubelet_api import DecodeError

SERVICE = "nri.pkg.api.v1alpha1."
PROCESS = "gpuhook-parser"  # the process's name
_NOBODY = 65534
_HEAD = struct.Struct(">?I")  # whether it is a request, and its length in bytes
_MOST = 1 << 25  # bytes of a result: JSON escapes characters, so it may be longer
_PIECE = 1 << 18
_ENDING = 0.5  # seconds for a killed process to end


class NoMessageError(PluginError):
    """An error because the engine's bytes aren't a message."""


@dataclass(frozen=True)
class NriRequest:
    """The used fields of a request: ``asked`` only for a container's, unless it is too long.

    ``understood`` is False if its payload isn't a message; ``engine`` is the engine's name and
    version in Configure.
    """

    service: str
    method: str
    understood: bool = True
    engine: tuple[str, str] = ("", "")
    more: bool = False
    asked: ContainerRequest | None = None


class Parser:
    """The parser process, which is started again if it has ended."""

    def __init__(self) -> None:
        self._pid = 0
        self._fd = -1

    def request(self, data: bytes, seconds: float) -> NriRequest:
        """Parse a request; PluginError if that fails, or takes longer than ``seconds``.

        NoMessageError if it isn't a message.
        """
        found = self._parsed(True, data, seconds)
        try:
            return _request(found)
        except (KeyError, TypeError, ValueError):
            self.close()
            raise _failed("returned something else") from None

    def status(self, data: bytes, seconds: float) -> tuple[int, str]:
        """Parse a response, and return its code and message; PluginError as for ``request``."""
        found = self._parsed(False, data, seconds)
        code, text = found.get("code"), found.get("message")
        if not (type(code) is int and isinstance(text, str)):
            self.close()
            raise _failed("returned something else")
        return code, text

    def start(self) -> None:
        """Start the process if it isn't running."""
        if self._pid:
            return
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            _serve(theirs.fileno())
        theirs.close()
        ours.setblocking(False)
        self._pid, self._fd = pid, ours.detach()

    def close(self) -> str:
        """Kill the process, and return how it has ended."""
        if not self._pid:
            return ""
        os.close(self._fd)
        signals.send_to_child(self._pid, signal.SIGKILL)
        status, self._pid, self._fd = kernel.reap(self._pid, _ENDING), 0, -1
        return "" if status is None else how_ended(status)

    def _parsed(self, is_request: bool, data: bytes, seconds: float) -> dict[str, Any]:
        self.start()
        end = time.monotonic() + seconds
        try:
            self._write(_HEAD.pack(is_request, len(data)) + data, end)
            size = int.from_bytes(self._read(4, end), "big")
            if size > _MOST:
                raise _failed(f"returned {size} bytes")
            found = json.loads(self._read(size, end))
        except (OSError, ValueError, RecursionError):
            raise _failed(f"ended {self.close()}".rstrip()) from None
        except BaseException:
            self.close()
            raise
        if not isinstance(found, dict):
            self.close()
            raise _failed("returned something else")
        if "error" in found:
            raise NoMessageError(
                "The engine sent an invalid message", "Check the engine's version and log"
            )
        return found

    def _write(self, data: bytes, end: float) -> None:
        left = memoryview(data)
        while left:
            self._wait([], [self._fd], end)
            left = left[os.write(self._fd, left[:_PIECE]) :]

    def _read(self, size: int, end: float) -> bytes:
        found = bytearray()
        while len(found) < size:
            self._wait([self._fd], [], end)
            piece = os.read(self._fd, min(size - len(found), _PIECE))
            if not piece:
                raise OSError
            found += piece
        return bytes(found)

    def _wait(self, reading: list[int], writing: list[int], end: float) -> None:
        left = end - time.monotonic()
        ready = left > 0 and select.select(reading, writing, [], left)
        if not ready or not any(ready):  # protects: parser-time
            raise _failed("takes too long")


def _failed(how: str) -> PluginError:
    return PluginError(
        f"The process that parses the engine's messages {how}", "Report it, with the pod's YAML"
    )


def _request(found: dict[str, Any]) -> NriRequest:
    """Return a request from the process's result; TypeError for fields of other types."""
    asked = found.get("asked")
    [engine] = _pairs([found.get("engine", ["", ""])])
    return NriRequest(
        _text(found["service"]),
        _text(found["method"]),
        found["understood"] is True,
        engine,
        found.get("more") is True,
        None if asked is None else _asked(asked),
    )


def _asked(found: dict[str, Any]) -> ContainerRequest:
    return ContainerRequest(
        _text(found["namespace"]),
        _text(found["pod"]),
        _text(found["name"]),
        _text(found["handler"]),
        tuple(map(_text, _list(found["env"]))),
        _pairs(found["mounts"]),
        _pairs(found["annotations"]),
        _pairs(found["pod_annotations"]),
        _text(found["id"]),
        _pairs(found["rlimits"]),
        _text(found["pod_uid"]),
    )


def _text(value: object) -> str:
    if not isinstance(value, str):  # protects: parser-types
        raise TypeError
    return value


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError
    return value


def _pairs(value: object) -> Pairs:
    return tuple((_text(one), _text(other)) for one, other in map(_list, _list(value)))


# The process itself -------------------------------------------------------------------------------


def _serve(fd: int) -> NoReturn:
    """Parse until the end of file."""
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        kernel.keep_only((fd,))
        kernel.set_name(PROCESS)
        _confine()
        while True:
            is_request, size = _HEAD.unpack(_exactly(fd, _HEAD.size))
            text = json.dumps(parsed(is_request, _exactly(fd, size))).encode()
            write_all(fd, len(text).to_bytes(4, "big") + text)
    finally:
        os._exit(1)


def _confine() -> None:
    """Drop root, and the resources that a compromised parser could use."""
    rootless = not in_first_user_namespace()
    kernel.give_up_root(_NOBODY, _NOBODY, rootless=rootless)  # protects: parser-privileges
    for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE):
        resource.setrlimit(limit, (0, 0))  # protects: parser-limits


def _exactly(fd: int, size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        piece = os.read(fd, min(size - len(found), _PIECE))
        if not piece:
            os._exit(0)
        found += piece
    return bytes(found)


def parsed(is_request: bool, data: bytes) -> dict[str, Any]:
    """Return the used fields of a request or response."""
    try:
        if not is_request:
            status = ttrpc.Response.FromString(data).status
            return {"code": status.code, "message": status.message}
        request = ttrpc.Request.FromString(data)
    except DecodeError:
        return {"error": "no message"}
    found = {"service": request.service, "method": request.method, "understood": True}
    read = _READERS.get(request.method)
    if request.service == f"{SERVICE}Plugin" and read is not None:
        try:
            return {**found, **read(request.payload)}
        except DecodeError:
            return {**found, "understood": False}
    return found


def _configuring(payload: bytes) -> dict[str, Any]:
    found = nri.ConfigureRequest.FromString(payload)
    return {"engine": [found.runtime_name, found.runtime_version]}


def _synchronizing(payload: bytes) -> dict[str, Any]:
    return {"more": nri.SynchronizeRequest.FromString(payload).more}


def _creating(payload: bytes) -> dict[str, Any]:
    if len(payload) > LONGEST:  # protects: nri-payload
        return {}
    request = nri.CreateContainerRequest.FromString(payload)
    pod, container = request.pod, request.container
    return {
        "asked": {
            "namespace": pod.namespace,
            "pod": pod.name,
            "name": container.name,
            "handler": pod.runtime_handler,
            "env": [*container.env],
            "mounts": [[each.destination, each.source] for each in container.mounts],
            "annotations": [*map(list, container.annotations.items())],
            "pod_annotations": [*map(list, pod.annotations.items())],
            "id": container.id,
            "rlimits": [[each.type, str(each.soft)] for each in container.rlimits],
            "pod_uid": pod.uid,
        }
    }


_READERS = {
    "Configure": _configuring,
    "Synchronize": _synchronizing,
    "CreateContainer": _creating,
}

"""The NRI plugin's service: registration, responses about containers, reconnection.

The engine asks it about each container of a pod, and adds the devices in its response. gpuhook's
runtime and RuntimeClass aren't needed, and no engine file is changed. Root's process has no
threads; a child without privileges parses the engine's messages (``parser``), and with a gate
another child queries the kubelet. ``transport`` is the wire format, ``answer`` the devices of a
container.
"""

import os
import select
import signal
import stat
import time
from collections.abc import Callable
from typing import Any

from gpuhook.base.container import kernel
from gpuhook.base.errors import ConfigError, GpuhookError, PluginError, printable, shown
from gpuhook.cluster.nri import answer
from gpuhook.cluster.nri.answer import InjectionMode
from gpuhook.cluster.nri.asked import PATIENCE, check_length, markers
from gpuhook.cluster.nri.messages import nri, ttrpc
from gpuhook.cluster.nri.parser import SERVICE, NoMessageError, NriRequest, Parser
from gpuhook.cluster.nri.transport import (
    MOST,
    PLUGIN,
    PROCESS,
    REQUEST,
    RESPONSE,
    RUNTIME,
    Connection,
    dial,
)
from gpuhook.cluster.nri.verdicts import Verdicts

NAME = "gpuhook"
INDEX = "50"  # plugins are called in the order of these two digits
# The method field (protobuf's field 2) of a request about containers that are running already.
_SYNCHRONIZE = b"\x12\x0bSynchronize"
_BEGINNING = 128  # bytes at a request's start that contain it
_CREATE = 1 << (4 - 1)  # the bit of the event CREATE_CONTAINER
# gRPC's codes
_UNKNOWN, _INVALID, _UNIMPLEMENTED = 2, 3, 12
_REGISTERED = 10.0  # seconds for the engine to send Configure
_AGAIN = 2.0  # seconds until the next connection attempt
_LONGEST = 1024  # bytes of a sentence for a pod's events

Tell = Callable[[str], None]


def run(path: str, current: Callable[[], InjectionMode], tell: Tell, *, index: str = INDEX) -> None:
    """Serve the engine at ``path`` until a signal, through all its restarts.

    ``current`` returns the current mode of injection; ConfigError if the settings are invalid.
    """
    kernel.set_name(PROCESS)
    stopping = _stop_pipe()
    said = ""
    parser = Parser()
    while True:
        try:
            answer.warm(current().config)
            parser.start()  # before the first container
            connection = dial(path, os.environ, stopping)
            try:
                NriPlugin(connection, parser, current, tell, index).serve()
            finally:
                connection.close()
        except GpuhookError as error:
            if str(error) != said:
                tell(f"{error}")
            said = str(error)
        else:
            return
        if "NRI_PLUGIN_SOCKET" in os.environ or select.select([stopping], [], [], _AGAIN)[0]:
            return


def _stop_pipe() -> int:
    """Return a descriptor that becomes readable on SIGTERM or SIGINT."""
    reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(writer)
    return reader


class NriPlugin:
    """The plugin on one connection, from its registration to the end."""

    def __init__(
        self,
        connection: Connection,
        parser: Parser,
        current: Callable[[], InjectionMode],
        tell: Tell,
        index: str,
    ) -> None:
        self._connection = connection
        self._parser = parser
        self._current = current
        self._last: InjectionMode | None = None
        self._verdicts = Verdicts()
        self._tell = tell
        self._index = index
        self._configured = False
        self._is_over = False
        self._engine = "an engine"
        self._calls: dict[str, Callable[[NriRequest], Any]] = {
            "Configure": self._configure,
            "Synchronize": self._synchronize,
            "Shutdown": self._shutdown,
            "StateChange": lambda _: nri.Empty(),  # of older engines
        }

    def serve(self) -> None:
        """Answer until the engine disconnects (PluginError) or a signal is received."""
        self._register()
        while True:
            message = self._connection.receive(None if self._configured else _REGISTERED)
            if message is None:
                return
            if message.connection == RUNTIME:
                self._registered(message.data)
            elif message.kind == REQUEST:
                # Too long: refused, because without a connection there would be no gate.
                is_long = len(message.data) > MOST  # protects: nri-long-message
                answer = self._too_long(message.data) if is_long else self._answer(message.data)
                if len(answer) > MOST:  # protects: nri-long-answer
                    answer = _refusal(_UNKNOWN, "gpuhook: the response is too long: request less")
                self._connection.send(PLUGIN, message.stream, RESPONSE, answer)
                if self._is_over:
                    raise PluginError("The engine shuts its plugins down", "No action is needed")

    def _register(self) -> None:
        plugin = nri.RegisterPluginRequest(plugin_name=NAME, plugin_idx=self._index)
        request = ttrpc.Request(
            service=f"{SERVICE}Runtime", method="RegisterPlugin", payload=plugin.SerializeToString()
        )
        self._connection.send(RUNTIME, 1, REQUEST, request.SerializeToString())

    def _registered(self, data: bytes) -> None:
        code, why = self._parser.status(data, PATIENCE)
        if code:
            raise PluginError(
                f"The engine refuses the plugin: {printable(why)}", "Look at the engine's log"
            )

    def _answer(self, data: bytes) -> bytes:
        """Return the response to any request, for errors an error response."""
        end = time.monotonic() + PATIENCE
        try:
            made = self._call(self._parser.request(data, PATIENCE), data, end)
        except NoMessageError:
            raise
        except (GpuhookError, OSError, ValueError) as error:
            self._tell(str(error))
            return _refusal(_UNKNOWN, f"gpuhook: {error}")
        except Exception as error:  # noqa: BLE001  # protects: nri-refusal
            # Otherwise a pod's container would start, and the next ones would have no gate.
            why = f"it failed: {type(error).__name__}: {shown(str(error))}. Report it"
            self._tell(why)
            return _refusal(_UNKNOWN, f"gpuhook: {why}")
        if isinstance(made, bytes):
            return made
        return bytes(ttrpc.Response(payload=made.SerializeToString()).SerializeToString())

    def _call(self, request: NriRequest, data: bytes, end: float) -> Any:
        """Return a message, or the whole response if that is an error."""
        if request.service != f"{SERVICE}Plugin":
            return _refusal(_UNIMPLEMENTED, "there is no such service")
        if not request.understood:
            return _refusal(_INVALID, "the request isn't understood")
        if request.method == "CreateContainer":
            return self._create(request, data, end)
        call = self._calls.get(request.method)
        if call is None:
            return _refusal(_UNIMPLEMENTED, "this plugin doesn't serve that")
        return call(request)

    def _too_long(self, data: bytes) -> bytes:
        """Return the response to a request that is too long: a refusal.

        A list of running containers may have any length: it only informs the plugin, and an error
        would keep the plugin from serving.
        """
        if _SYNCHRONIZE in data[:_BEGINNING]:  # protects: nri-long-synchronize
            payload = self._synchronize(NriRequest("", "")).SerializeToString()
            return bytes(ttrpc.Response(payload=payload).SerializeToString())
        return _refusal(_UNKNOWN, f"gpuhook: the request has more than {MOST} bytes")

    # Requests of the engine ----------------------------------------------------------------------

    def _configure(self, request: NriRequest) -> Any:
        self._configured = True
        self._engine = " ".join(map(printable, request.engine))
        return nri.ConfigureResponse(events=_CREATE)

    def _synchronize(self, request: NriRequest) -> Any:
        """Accept the list of running containers, part by part: they can't be changed."""
        if not request.more:
            self._tell(f"Serves {self._engine}")  # which sends containers from now on
        return nri.SynchronizeResponse(more=request.more)

    def _create(self, request: NriRequest, data: bytes, end: float) -> Any:
        start, asked = end - PATIENCE, request.asked
        way = self._way(data)
        if way is None:
            return nri.CreateContainerResponse()
        if asked is None:
            check_length(data, way.config)
            return nri.CreateContainerResponse()
        found = answer.decide(asked, way, end)
        made = nri.CreateContainerResponse(adjust=adjustment(found.edits))
        if found.verdict is not None:
            self._verdicts.write(way.config.state_dir, asked.id, found.verdict)
        if found.edits:
            spent = (time.monotonic() - start) * 1000
            who = "/".join(map(printable, (asked.namespace, asked.pod, asked.name)))
            self._tell(f"{who}: answered in {spent:.0f} ms")
        return made

    def _way(self, payload: bytes) -> InjectionMode | None:
        """Return the current mode; None if it is unknown and the request is about no devices.

        ConfigError if config.toml can't be read and a container may ask for devices.
        """
        try:
            self._last = self._current()
        except ConfigError:
            if self._last is None or any(word in payload for word in markers(self._last.config)):
                raise
            return None
        return self._last

    def _shutdown(self, _: NriRequest) -> Any:
        self._is_over = True
        return nri.Empty()


def _refusal(code: int, why: str) -> bytes:
    text = why.encode()[:_LONGEST].decode(errors="ignore")
    status = ttrpc.Status(code=code, message=text)
    return bytes(ttrpc.Response(status=status).SerializeToString())


# Conversion of CDI edits to NRI -----------------------------------------------------------------


def adjustment(edits: dict[str, Any]) -> Any:
    """Return CDI edits as an adjustment of a container; PluginError for a missing node."""
    made = nri.ContainerAdjustment()
    for name in edits.get("names", ()):
        made.CDI_devices.add(name=name)
    for setting in edits.get("env", ()):
        key, _, value = setting.partition("=")
        made.env.add(key=key, value=value)
    for mount in edits.get("mounts", ()):
        made.mounts.add(
            destination=mount["containerPath"],
            source=mount["hostPath"],
            type=mount.get("type", "bind"),
            options=mount.get("options", ("ro", "nosuid", "nodev", "rbind", "rprivate")),
        )
    for limit in edits.get("rlimits", ()):
        made.rlimits.add(**limit)
    for node in edits.get("deviceNodes", ()):
        _add_node(made, node)
    for hook in edits.get("hooks", ()):
        if hook["hookName"] == "createContainer":
            made.hooks.create_container.add(
                path=hook["path"], args=hook.get("args", ()), env=hook.get("env", ())
            )
    return made


def _add_node(made: Any, node: dict[str, Any]) -> None:
    """Add a node with its current numbers, mode and owner on the host."""
    path = node.get("hostPath") or node["path"]
    try:
        status = os.stat(path)
    except OSError as error:
        raise PluginError(
            f"The device node {path} can't be examined: {error.strerror}", "Load the driver again"
        ) from None
    if not stat.S_ISCHR(status.st_mode):
        raise PluginError(f"{path} isn't a device node", "Load the driver again")
    device = made.linux.devices.add(
        path=node["path"],
        type="c",
        major=os.major(status.st_rdev),
        minor=os.minor(status.st_rdev),
    )
    device.file_mode.value = status.st_mode & 0o777
    device.uid.value = node.get("uid", status.st_uid)
    device.gid.value = node.get("gid", status.st_gid)

"""The device plugin's gRPC server: lists devices for the kubelet, and answers allocations.

Each resource has its own socket, as the kubelet requires. It is registered while the kubelet's
ListAndWatch stream is open.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import quote

from gpuhook.base.errors import GpuhookError, PluginError, RequestError, listed, shown
from gpuhook.cluster.device_plugin import allocate, prefer
from gpuhook.cluster.device_plugin.settings import Settings
from gpuhook.cluster.device_plugin.state import PluginState, Resource
from gpuhook.cluster.device_plugin.status import StatusFile
from gpuhook.cluster.kubelet_endpoint import folder
from gpuhook.cluster.kubelet_endpoint.server import Endpoint, EndpointServer, grpc
from gpuhook.monitor import kubelet_api as api
from gpuhook.monitor.host.child import Tell

_REGISTER = 15.0  # seconds for a registration; the kubelet may take up to 10 to connect back
_STREAM = 10.0  # seconds for the kubelet to request the list after a registration
_OPTIONS = api.plugin.DevicePluginOptions(get_preferred_allocation_available=True)

# A new connection each time: a shared one would wait because of earlier failures.
_CHANNEL = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.default_authority", "localhost"),
    ("grpc.enable_http_proxy", 0),
)


def _devices(count: int) -> str:
    return "1 device" if count == 1 else f"{count} devices"


def _list_of(resource: Resource) -> bytes:
    """Return the complete list of a resource's devices, as ListAndWatch sends it."""
    answer = api.plugin.ListAndWatchResponse()
    for name, unit in resource.offers().items():
        health = api.UNHEALTHY if unit.reason else api.HEALTHY
        device = answer.devices.add(ID=name, health=health)
        if unit.numa is not None:
            device.topology.nodes.add(ID=unit.numa)
    return bytes(answer.SerializeToString())


def _answer_of(answer: allocate.ContainerResponse) -> Any:
    """Return Allocate's response for one container as a message."""
    message = api.plugin.ContainerAllocateResponse(envs=answer.envs, annotations=answer.annotations)
    for each in answer.mounts:
        paths = {"container_path": each.container, "host_path": each.host}
        message.mounts.add(**paths, read_only=each.read_only)
    for node in answer.devices:
        message.devices.add(container_path=node.container, host_path=node.host, permissions="rw")
    for name in answer.cdi_devices:
        message.cdi_devices.add(name=name)
    return message


async def _refuse(context: Any, error: GpuhookError) -> None:
    """Abort a call with an error."""
    is_requests = isinstance(error, RequestError)
    code = grpc.StatusCode.INVALID_ARGUMENT if is_requests else grpc.StatusCode.FAILED_PRECONDITION
    await context.abort(code, str(error))


class _Resource(Endpoint):
    """One resource."""

    state: Resource
    _server: "PluginServer"

    def __init__(self, name: str, server: "PluginServer") -> None:
        self.settings = server.settings
        super().__init__(name, server, f"{self.settings.kubelet_folder}/{api.REGISTRY}")
        # A domain has no "_", so two resources never share a name.
        self._socket = f"gpuhook-{name.replace('/', '_')}.sock"
        self._streams = 0  # open now
        self._asked = False  # whether the kubelet has requested the list
        server.status.set(name, "it isn't registered with the kubelet yet")
        self.task.add_done_callback(lambda _: server.status.drop(name))

    def _services(self) -> Mapping[str, Sequence[Any]]:
        folder.sweep(self.settings.kubelet_folder, r"gpuhook-.+\.sock")
        requests = api.plugin
        methods = {
            "GetDevicePluginOptions": (self._options, requests.Empty),
            "GetPreferredAllocation": (self._prefer, requests.PreferredAllocationRequest),
            "Allocate": (self._allocate, requests.AllocateRequest),
            "PreStartContainer": (self._pre_start, requests.PreStartContainerRequest),
            "ListAndWatch": (self._watch, None),
        }
        path = f"{self.settings.kubelet_folder}/{self._socket}"
        return {path: [self.service(api.DEVICE_PLUGIN, methods)]}

    def withdraw(self) -> None:
        """End with an empty list."""
        self.update(replace(self.state, units=()))
        super().withdraw()

    # Registration -----------------------------------------------------------------------------

    async def _keep(self) -> str:
        if not self.settings.register:
            self.succeed(f"served on {self._socket}, and not registered")
            return await super()._keep()
        self._asked = False
        await self._register()
        try:
            async with asyncio.timeout(_STREAM):
                await self.until(lambda: self._asked)
        except TimeoutError:
            raise PluginError(
                "The kubelet registered the resource, but didn't ask for its devices",
                "See the kubelet's log",
            ) from None
        self.succeed(f"registered with the kubelet, {_devices(len(self.state.offers()))}")
        await self.until(lambda: not self._streams)
        return "the kubelet has ended the connection; registering again"

    async def _register(self) -> None:
        request = api.plugin.RegisterRequest(
            version=api.VERSION, endpoint=self._socket, resource_name=self.name, options=_OPTIONS
        )
        if self._kubelet is None:
            why, remedy = f"{self._registry} isn't there", "The kubelet creates it when it starts"
            raise PluginError(why, remedy)
        target = f"unix:{quote(self._registry)}"
        async with grpc.aio.insecure_channel(target, options=_CHANNEL) as channel:
            call = channel.unary_unary(api.REGISTER)
            try:
                await call(request.SerializeToString(), timeout=_REGISTER)
            except grpc.aio.AioRpcError as error:
                away = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED
                raise PluginError(
                    f"No kubelet answers at {self._registry}"
                    if error.code() in away
                    else f"The kubelet refuses to register it: {shown(error.details())}",
                    "Registering is retried; see the kubelet's log",
                ) from None

    def fail(self, reason: str) -> None:
        """Log a problem, and enter it in the status file."""
        waits = "waiting for the kubelet: " if self._kubelet is None else ""
        self._server.status.set(self.name, f"{waits}{reason}")
        super().fail(f"{waits}{reason}")

    def succeed(self, sentence: str) -> None:
        """Log a success, and enter it in the status file."""
        self._server.status.set(self.name, "")
        super().succeed(sentence)

    # What it serves ---------------------------------------------------------------------------

    async def _watch(self, _: bytes, context: Any) -> None:
        """Send the list, at once and whenever it changes (ListAndWatch).

        A slow kubelet gets only the newest list. gRPC cancels this task when either side ends the
        call.
        """
        sent = None
        self._streams += 1
        self._asked = True
        self._server.notice()
        try:
            while True:
                news = self.news
                if sent != (newest := _list_of(self.state)):
                    sent = newest
                    await context.write(sent)
                elif self.is_ending:
                    return
                else:
                    await news.wait()
        finally:
            self._streams -= 1
            self._server.notice()

    async def _options(self, _request: Any, _context: Any) -> Any:
        return _OPTIONS

    async def _prefer(self, request: Any, context: Any) -> Any:
        answer = api.plugin.PreferredAllocationResponse()
        for each in request.container_requests:
            available, must = list(each.available_deviceIDs), list(each.must_include_deviceIDs)
            choice = self.state, available, must, each.allocation_size
            try:
                ids = prefer.prefer(*choice, self.settings)
            except GpuhookError as error:
                await _refuse(context, error)
            answer.container_responses.add(deviceIDs=ids)
        return answer

    async def _allocate(self, request: Any, context: Any) -> Any:
        began, answer = time.monotonic(), api.plugin.AllocateResponse()
        failed = True
        try:
            for each in request.container_requests:
                ids = list(each.devices_ids)
                given = allocate.allocate(self.state, ids, self.settings)
                await asyncio.to_thread(  # another process may hold the ledger's lock
                    allocate.record, self.state, ids, self.settings.state_dir, self.tell
                )
                answer.container_responses.append(_answer_of(given))
                self.tell(f"{_devices(len(ids))} for a container: {listed(ids)}")
            failed = False
        except GpuhookError as error:
            self.tell(str(error))
            await _refuse(context, error)
        finally:
            self._server.count([self.name], began, failed=failed)
        return answer

    async def _pre_start(self, _request: Any, _context: Any) -> Any:
        return api.plugin.PreStartContainerResponse()


class PluginServer(EndpointServer):
    """The server of all resources, whose states the supervisor sends on a descriptor."""

    def __init__(self, settings: Settings, supervisor: int, tell: Tell) -> None:
        super().__init__(supervisor, tell, [settings.kubelet_folder])
        self.settings = settings
        self.status = StatusFile(settings.status_dir if settings.register else "")

    def _take(self, line: bytes) -> None:
        self.wanted = {each.name: each for each in PluginState.from_line(line).resources}

    def _make(self, name: str) -> Endpoint:
        return _Resource(name, self)

    def _watch(self) -> None:
        self.status.keep()
        super()._watch()

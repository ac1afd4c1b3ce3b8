"""The device plugin's gRPC server: lists devices for the kubelet, and answers allocations.

Each resource has its own socket, as the kubelet requires, and a task that keeps it registered.

A resource is registered while the kubelet's ListAndWatch stream is open, the kubelet's socket is
unchanged, and our socket is in the folder. When that ends, the task serves and registers again.
"""

import asyncio
import os
import re
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any
from urllib.parse import quote

from gpuhook.base.errors import GpuhookError, PluginError, RequestError, listed, shown
from gpuhook.cluster.device_plugin import allocate, prefer
from gpuhook.cluster.device_plugin.settings import Settings
from gpuhook.cluster.device_plugin.state import Resource, State
from gpuhook.cluster.device_plugin.status import StatusFile
from gpuhook.cluster.kubelet_endpoint.folder import Folder, Identity
from gpuhook.cluster.kubelet_endpoint.server import (
    Endpoint,
    EndpointServer,
    Socket,
    grpc,
    run,
    service,
)
from gpuhook.monitor import kubelet_api as api
from gpuhook.monitor.host.child import Tell
from gpuhook.monitor.ledger.records import Records

_REGISTER = 15.0  # seconds for a registration; the kubelet may take up to 10 to connect back
_STREAM = 10.0  # seconds for the kubelet to request the list after a registration
_SHORT_PAUSE = 1.0  # maximum pause after a registration that didn't last
_STEADY = 10.0  # seconds after which a registration counts as stable
_STARTING = "it isn't registered with the kubelet yet"
_OURS = re.compile(r"gpuhook-.+\.sock")
_RESOURCE = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-\w.]*[A-Za-z0-9])?", re.ASCII)

# A new connection each time: a shared one would wait because of earlier failures.
_CHANNEL = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.default_authority", "localhost"),
    ("grpc.enable_http_proxy", 0),
)

# Takes an allocation's resource, its seconds and whether it failed.
Report = Callable[[str, float, bool], None]


def serve(settings: Settings, states: int, tell: Tell) -> int:
    """Serve the states read as lines from the descriptor ``states``; return the exit status.

    ``tell`` gets sentences for the log.
    """
    status = StatusFile(settings.state_dir if settings.register else "")
    return run(_PluginServer(settings, states, tell, status).run())


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
    text: bytes = answer.SerializeToString()
    return text


def _answer_of(answer: allocate.Answer) -> Any:
    """Return Allocate's response for one container as a message."""
    parts = api.plugin
    return parts.ContainerAllocateResponse(
        envs=answer.envs,
        mounts=[
            parts.Mount(
                container_path=each.container, host_path=each.host, read_only=each.read_only
            )
            for each in answer.mounts
        ],
        devices=[
            parts.DeviceSpec(container_path=each.container, host_path=each.host, permissions="rw")
            for each in answer.devices
        ],
        annotations=answer.annotations,
        cdi_devices=[parts.CDIDevice(name=each) for each in answer.cdi_devices],
    )


class _Service(Socket):
    """A gRPC server on its own socket for one resource."""

    def __init__(self, offer: "_Resource", folder: Folder, name: str) -> None:
        self.streams = 0  # open now
        self.asked = 0  # opened so far
        self._offer = offer
        self._ending = False
        requests = api.plugin
        methods = {
            "GetDevicePluginOptions": (self._options, requests.Empty),
            "GetPreferredAllocation": (self._prefer, requests.PreferredAllocationRequest),
            "Allocate": (self._allocate, requests.AllocateRequest),
            "PreStartContainer": (self._pre_start, requests.PreStartContainerRequest),
        }
        streams = {"ListAndWatch": self._watch}
        super().__init__(folder, name, [service(api.DEVICE_PLUGIN, methods, streams, offer.tell)])

    async def stop(self) -> None:
        """End the streams after their newest list, then the server, and remove the socket."""
        self._ending = True
        self._offer.wake()
        await super().stop()

    async def _watch(self, _: bytes, context: Any) -> None:
        """Send the list, at once and whenever it changes (ListAndWatch).

        A slow kubelet gets only the newest list. gRPC cancels this task when either side ends the
        call.
        """
        sent = None
        self.streams += 1
        self.asked += 1
        self._offer.notice()
        try:
            while True:
                news = self._offer.news
                if sent != (newest := _list_of(self._offer.state)):
                    sent = newest
                    await context.write(sent)
                elif self._ending:
                    return
                else:
                    await news.wait()
        finally:
            self.streams -= 1
            self._offer.notice()

    async def _options(self, _request: Any, _context: Any) -> Any:
        return _options()

    async def _prefer(self, request: Any, context: Any) -> Any:
        answer = api.plugin.PreferredAllocationResponse()
        offer = self._offer
        for each in request.container_requests:
            available, must = list(each.available_deviceIDs), list(each.must_include_deviceIDs)
            try:
                ids = prefer.prefer(
                    offer.state, available, must, each.allocation_size, offer.settings
                )
            except GpuhookError as error:
                await _refuse(context, error)
            answer.container_responses.add(deviceIDs=ids)
        return answer

    async def _allocate(self, request: Any, context: Any) -> Any:
        began, failed = time.monotonic(), True
        try:
            answer = await self._allocated(request, context)
            failed = False
            return answer
        finally:
            self._offer.report(self._offer.state.name, time.monotonic() - began, failed)

    async def _allocated(self, request: Any, context: Any) -> Any:
        answer = api.plugin.AllocateResponse()
        offer = self._offer
        for each in request.container_requests:
            ids = list(each.devices_ids)
            try:
                given = allocate.allocate(offer.state, ids, offer.settings)
                await asyncio.to_thread(self._lend, ids)  # another may have the lock
            except GpuhookError as error:
                offer.tell(str(error))
                await _refuse(context, error)
            answer.container_responses.append(_answer_of(given))
            count = _devices(len(ids))
            offer.tell(f"{count} for a container: {listed(ids)}")
        return answer

    def _lend(self, ids: list[str]) -> None:
        """Record in the ledger that these devices are allocated, so that no claim gets them.

        If there is no ledger and it can't be made, that is only logged.
        """
        resource, state_dir = self._offer.state, self._offer.settings.state_dir
        if not state_dir:
            return
        records = Records(state_dir)
        offers = resource.offers()
        units = {offers[each].id: offers[each].whole for each in ids}
        try:
            records.lend(resource.vendor, resource.name, units.items())
        except PluginError as error:
            if os.path.isdir(records.folder):
                raise
            self._offer.tell(str(error))

    async def _pre_start(self, _request: Any, _context: Any) -> Any:
        return api.plugin.PreStartContainerResponse()


def _options() -> Any:
    return api.plugin.DevicePluginOptions(get_preferred_allocation_available=True)


async def _refuse(context: Any, error: GpuhookError) -> None:
    """Abort a call with an error."""
    is_requests = isinstance(error, RequestError)
    code = grpc.StatusCode.INVALID_ARGUMENT if is_requests else grpc.StatusCode.FAILED_PRECONDITION
    await context.abort(code, str(error))


class _Resource(Endpoint):
    """One resource, which ``run`` keeps registered with the kubelet."""

    state: Resource

    def __init__(
        self,
        resource: Resource,
        settings: Settings,
        folder: Folder,
        tell: Tell,
        status: StatusFile,
        report: Report,
    ) -> None:
        super().__init__(resource.name, resource, tell)
        self.settings = settings
        self.report = report
        self._status = status
        status.set(resource.name, _STARTING)
        self._folder = folder
        self._service: _Service | None = None
        self._registry: Identity | None = None

    async def run(self) -> None:
        """Serve and register, repeatedly, until cancelled; then close everything."""
        try:
            while True:
                await self._keep()
                await self._rest()
        finally:
            self._status.drop(self.name)
            if self.is_withdrawn:
                self.update(replace(self.state, units=()))
            await self._close()

    async def _keep(self) -> None:
        """Register, and wait until the registration ends; log a failure."""
        registry = self._folder.identity(api.REGISTRY)
        if registry != self._registry:
            self._back_off.reset()
        self._registry = registry
        try:
            service = await self._serve()
            if not self.settings.register:
                await self._serve_alone(service)
                return
            reason = await self._unless_moved(service, self._register(service))
        except PluginError as error:
            waits = "waiting for the kubelet: " if registry is None else ""
            self._status.set(self.name, f"{waits}{error}")
            self._say(f"{waits}{error}")
            return
        if reason:
            self._status.set(self.name, reason)
            return
        self._said.clear()
        count = _devices(len(self.state.offers()))
        self.tell(f"registered with the kubelet, {count}")
        self._status.set(self.name, "")
        loop = asyncio.get_running_loop()
        began = loop.time()
        reason = await self._unless_moved(service, self._until_disconnected(service))
        if loop.time() - began > _STEADY:
            self._back_off.reset()
        self._back_off.pause = min(self._back_off.pause, _SHORT_PAUSE / 2)  # half the next one
        self._status.set(self.name, reason)
        self._say(f"{reason}; registering again")

    async def _unless_moved(self, service: _Service, work: Coroutine[Any, Any, str]) -> str:
        """Return the result of ``work``, or which socket has changed before it ended.

        A kubelet that starts during the registration may wait for a socket that it just removed.
        """
        tasks = [asyncio.create_task(work), asyncio.create_task(self._until_moved(service))]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return next(task for task in tasks if task in done).result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self) -> _Service:
        """Return a server on a socket in the folder, without open streams."""
        now = self._service
        if now and not now.streams and now.is_there():
            return now
        await self._close()
        name = self._folder.free(_socket_name(self.name))
        new = self._service = _Service(self, self._folder, name)
        await new.start()
        return new

    async def _close(self) -> None:
        if self._service is not None:
            await self._service.stop()  # repeated if this is cancelled meanwhile
            self._service = None

    async def _register(self, service: _Service) -> str:
        """Register with the kubelet, and wait until it has requested the list; return ""."""
        path = f"{self._folder.path}/{api.REGISTRY}"
        request = api.plugin.RegisterRequest(
            version=api.VERSION,
            endpoint=service.name,
            resource_name=self.name,
            options=_options(),
        )
        if self._registry is None:
            raise PluginError(f"{path} isn't there", "The kubelet creates it when it starts")
        before = service.asked
        async with grpc.aio.insecure_channel(f"unix:{quote(path)}", options=_CHANNEL) as channel:
            try:
                await channel.unary_unary(api.REGISTER)(
                    request.SerializeToString(), timeout=_REGISTER
                )
            except grpc.aio.AioRpcError as error:
                raise _registration_error(error, path) from None
        try:
            async with asyncio.timeout(_STREAM):
                while service.asked == before:
                    await self._next()
        except TimeoutError:
            raise PluginError(
                "The kubelet registered the resource, but didn't ask for its devices",
                "See the kubelet's log",
            ) from None
        return ""

    async def _serve_alone(self, service: _Service) -> None:
        """Serve any client of the socket, until it is removed, without registration."""
        self._said.clear()
        self.tell(f"served on {service.name}, and not registered")
        while service.is_there():
            await self._next()

    async def _until_disconnected(self, service: _Service) -> str:
        """Wait until the kubelet has no open stream; return that as a reason."""
        while service.streams:
            await self._next()
        return "the kubelet has ended the connection"

    async def _until_moved(self, service: _Service) -> str:
        """Wait until a socket was removed or replaced; return which as a reason."""
        while True:
            if not service.is_there():
                return "its socket was removed"
            if self._folder.identity(api.REGISTRY) not in (None, self._registry):
                return "the kubelet's socket is a new one"
            await self._next()

    async def _rest(self) -> None:
        """Pause, longer each time, or until the kubelet's socket has changed."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._back_off.grow()):
                while self._folder.identity(api.REGISTRY) in (None, self._registry):
                    await self._next()


def _socket_name(resource: str) -> str:
    """Return the name of a resource's socket; PluginError if it isn't a resource's name."""
    if not _RESOURCE.fullmatch(resource):
        raise PluginError(
            f"{shown(resource)} isn't a resource name",
            "Name it like nvidia.com/gpu in the device plugin's configuration",
        )
    # A domain has no "_", so two resources never share a name.
    return f"gpuhook-{resource.replace('/', '_')}.sock"


def _registration_error(error: Any, path: str) -> PluginError:
    if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        return PluginError(f"No kubelet answers at {path}", "Registering is retried until one does")
    return PluginError(
        f"The kubelet refuses to register it: {shown(error.details())}",
        "Registering is retried; see the kubelet's log",
    )


class _PluginServer(EndpointServer):
    """The server of all resources."""

    poll = 2.0

    def __init__(self, settings: Settings, states: int, tell: Tell, status: StatusFile) -> None:
        super().__init__(states, tell)
        self._settings = settings
        self._file = status

    async def run(self) -> int:
        """Remove sockets left by killed processes, and serve."""
        with suppress(PluginError):  # reported again if it matters
            self.folder(self._settings.kubelet_folder).sweep(_OURS)
        return await super().run()

    def _take(self, lines: Sequence[bytes]) -> None:
        state = State.from_line(lines[-1])
        self.wanted = {resource.name: resource for resource in state.resources}

    def _make(self, name: str) -> Endpoint:
        folder = self.folder(self._settings.kubelet_folder)
        report = self._report if self._settings.metrics_listen else lambda *_: None
        return _Resource(self.wanted[name], self._settings, folder, self._tell, self._file, report)

    def notice(self) -> None:
        """Make every endpoint check the folder, and keep the status file."""
        self._file.keep()
        super().notice()

    def _report(self, resource: str, seconds: float, failed: bool) -> None:
        self.send({"resource": resource, "seconds": seconds, "failed": failed})

"""The device plugin's gRPC server: lists devices for the kubelet, and answers allocations.

It runs in its own process, a child of the supervisor, which writes a state into a pipe whenever it
changes. Each resource has its own socket, as the kubelet requires, and a task that keeps it
registered.

A resource is registered while the kubelet's ListAndWatch stream is open, the kubelet's socket is
unchanged, and our socket is in the folder. When that ends, the task serves and registers again.
There is one thread and one loop; streams wait without a thread.
"""

import asyncio
import json
import os
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from typing import Any
from urllib.parse import quote

from gpuhook.base.errors import GpuhookError, PluginError, RequestError, listed, shown
from gpuhook.cluster.device_plugin import allocate, prefer
from gpuhook.cluster.device_plugin.folder import Folder, Identity
from gpuhook.cluster.device_plugin.settings import Settings
from gpuhook.cluster.device_plugin.state import Resource, State
from gpuhook.cluster.device_plugin.status import StatusFile
from gpuhook.monitor import INSTALL
from gpuhook.monitor import kubelet_api as api
from gpuhook.monitor.ledger.records import Records

# Set before gRPC is loaded: this process doesn't fork, and gRPC's own log doesn't help operators.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
try:
    import grpc
except ImportError as missing:
    raise PluginError(
        "The Python package grpcio isn't installed, and speaking to a kubelet needs it",
        INSTALL,
    ) from missing

_LOOK = 2.0  # seconds between checks of the folder; inotify reports most changes at once
_REGISTER = 15.0  # seconds for a registration; the kubelet may take up to 10 to connect back
_STREAM = 10.0  # seconds for the kubelet to request the list after a registration
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 10.0  # seconds between two attempts
_SHORT_PAUSE = 1.0  # maximum pause after a registration that didn't last
_STEADY = 10.0  # seconds after which a registration counts as stable
_END = 0.5  # seconds for streams to end by themselves
_STOP = 1.5  # seconds for the whole shutdown
_REASONS = 16  # logged messages that are remembered, so that each is logged once
_STARTING = "it isn't registered with the kubelet yet"
_PIECE = 1 << 16  # bytes of a state that are read at once
_LINE = 16 << 20  # bytes of a state, at most

# A new connection each time: a shared one would wait because of earlier failures.
_CHANNEL = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.default_authority", "localhost"),
    ("grpc.enable_http_proxy", 0),
)

Tell = Callable[[str], None]
# Takes an allocation's resource, its seconds and whether it failed.
Report = Callable[[str, float, bool], None]
Method = Callable[[Any, Any], Awaitable[Any]]


def serve(settings: Settings, states: int, tell: Tell) -> int:
    """Serve the states read as lines from the descriptor ``states``; return the exit status.

    0 at the end of file or after SIGTERM, 1 for an invalid state. ``tell`` gets sentences for the
    log. This changes the process's umask and signal handlers.
    """
    status = StatusFile(settings.state_dir if settings.register else "")
    os.umask(0o077)  # only root may use the sockets
    return asyncio.run(_Server(settings, states, tell, status).run())


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


class _Offer:
    """The current state of one resource, independent of its socket."""

    def __init__(self, resource: Resource, settings: Settings, tell: Tell) -> None:
        self.resource = resource
        self.settings = settings
        self.tell = tell
        self.report: Report = lambda *_: None
        self.news = asyncio.Event()  # set when there is a newer state, and replaced

    def update(self, resource: Resource) -> None:
        """Set a newer state."""
        if resource != self.resource:
            self.resource = resource
            self.wake()

    def withdraw(self) -> None:
        """Remove all devices."""
        self.update(replace(self.resource, units=()))

    def wake(self) -> None:
        """Wake the streams."""
        self.news.set()
        self.news = asyncio.Event()


class _Service:
    """A gRPC server on its own socket for one resource."""

    def __init__(self, offer: _Offer, name: str, changed: Callable[[], None]) -> None:
        self.name = name
        self.streams = 0  # open now
        self.asked = 0  # opened so far
        self.identity: Identity | None = None
        self._offer = offer
        self._changed = changed
        self._ending = False
        self._server = grpc.aio.server(handlers=(self._handlers(),))

    def _handlers(self) -> Any:
        requests = api.plugin
        unary = {
            "GetDevicePluginOptions": (self._options, requests.Empty),
            "GetPreferredAllocation": (self._prefer, requests.PreferredAllocationRequest),
            "Allocate": (self._allocate, requests.AllocateRequest),
            "PreStartContainer": (self._pre_start, requests.PreStartContainerRequest),
        }
        methods = {
            name: grpc.unary_unary_rpc_method_handler(
                self._reporting(method),
                request_deserializer=request.FromString,
                response_serializer=lambda answer: answer.SerializeToString(),
            )
            for name, (method, request) in unary.items()
        }
        methods["ListAndWatch"] = grpc.unary_stream_rpc_method_handler(self._reporting(self._watch))
        return grpc.method_handlers_generic_handler(api.DEVICE_PLUGIN, methods)

    def _reporting(self, method: Method) -> Method:
        """Wrap a method so that its errors are logged, because gRPC's reports are short."""

        async def reported(request: Any, context: Any) -> Any:
            try:
                return await method(request, context)
            except Exception as error:
                if not isinstance(error, grpc.aio.AbortError):
                    self._offer.tell(f"{self._offer.resource.name}: a call failed: {error!r}")
                raise

        return reported

    async def start(self, folder: Folder) -> None:
        """Start serving; PluginError if that fails."""
        path = f"{folder.path}/{self.name}"
        try:
            self._server.add_insecure_port(f"unix:{quote(path)}")
        except RuntimeError:
            raise PluginError(
                f"The socket {path} can't be made",
                "Run the device plugin as root, with this folder writable",
            ) from None
        await self._server.start()
        self.identity = folder.identity(self.name)

    def is_in(self, folder: Folder) -> bool:
        """Tell whether its socket exists: a starting kubelet may remove it at any time."""
        return self.identity is not None and self.identity == folder.identity(self.name)

    async def stop(self) -> None:
        """End the streams after their newest list, then the server, and remove the socket."""
        self._ending = True
        self._offer.wake()
        await self._server.stop(_END)

    async def _watch(self, _: bytes, context: Any) -> None:
        """Send the list, at once and whenever it changes (ListAndWatch).

        A slow kubelet gets only the newest list. gRPC cancels this task when either side ends the
        call.
        """
        sent = None
        self.streams += 1
        self.asked += 1
        self._changed()
        try:
            while True:
                news = self._offer.news
                if sent != (newest := _list_of(self._offer.resource)):
                    sent = newest
                    await context.write(sent)
                elif self._ending:
                    return
                else:
                    await news.wait()
        finally:
            self.streams -= 1
            self._changed()

    async def _options(self, _request: Any, _context: Any) -> Any:
        return _options()

    async def _prefer(self, request: Any, context: Any) -> Any:
        answer = api.plugin.PreferredAllocationResponse()
        offer = self._offer
        for each in request.container_requests:
            available, must = list(each.available_deviceIDs), list(each.must_include_deviceIDs)
            try:
                ids = prefer.prefer(
                    offer.resource, available, must, each.allocation_size, offer.settings
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
            self._offer.report(self._offer.resource.name, time.monotonic() - began, failed)

    async def _allocated(self, request: Any, context: Any) -> Any:
        answer = api.plugin.AllocateResponse()
        offer = self._offer
        for each in request.container_requests:
            ids = list(each.devices_ids)
            try:
                given = allocate.allocate(offer.resource, ids, offer.settings)
                await asyncio.to_thread(self._lend, ids)  # another may have the lock
            except GpuhookError as error:
                offer.tell(f"{offer.resource.name}: {error}")
                await _refuse(context, error)
            answer.container_responses.append(_answer_of(given))
            count = _devices(len(ids))
            offer.tell(f"{offer.resource.name}: {count} for a container: {listed(ids)}")
        return answer

    def _lend(self, ids: list[str]) -> None:
        """Record in the ledger that these devices are allocated, so that no claim gets them.

        If there is no ledger and it can't be made, that is only logged.
        """
        resource, state_dir = self._offer.resource, self._offer.settings.state_dir
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
            self._offer.tell(f"{resource.name}: {error}")

    async def _pre_start(self, _request: Any, _context: Any) -> Any:
        return api.plugin.PreStartContainerResponse()


def _options() -> Any:
    return api.plugin.DevicePluginOptions(get_preferred_allocation_available=True)


async def _refuse(context: Any, error: GpuhookError) -> None:
    """Abort a call with an error."""
    is_requests = isinstance(error, RequestError)
    code = grpc.StatusCode.INVALID_ARGUMENT if is_requests else grpc.StatusCode.FAILED_PRECONDITION
    await context.abort(code, str(error))


class _Endpoint:
    """One resource, which ``run`` keeps registered with the kubelet."""

    def __init__(
        self,
        resource: Resource,
        settings: Settings,
        folder: Folder,
        tell: Tell,
        status: StatusFile,
    ) -> None:
        self.offer = _Offer(resource, settings, tell)
        self._status = status
        status.set(resource.name, _STARTING)
        self.withdrawn = False
        self._name = resource.name
        self._folder = folder
        self._service: _Service | None = None
        self._registry: Identity | None = None
        self._pause = _FIRST_PAUSE
        self._said: list[str] = []
        self._moved = asyncio.Event()

    def notice(self) -> None:
        """Check the folder and the streams again after a change."""
        self._moved.set()

    async def run(self) -> None:
        """Serve and register, repeatedly, until cancelled; then close everything."""
        try:
            while True:
                await self._keep()
                await self._rest()
        finally:
            self._status.drop(self._name)
            if self.withdrawn:
                self.offer.withdraw()
            await self._close()

    async def _keep(self) -> None:
        """Register, and wait until the registration ends; log a failure."""
        registry = self._folder.identity(api.REGISTRY)
        if registry != self._registry:
            self._pause = _FIRST_PAUSE
        self._registry = registry
        try:
            service = await self._serve()
            if not self.offer.settings.register:
                await self._serve_alone(service)
                return
            reason = await self._unless_moved(service, self._register(service))
        except PluginError as error:
            waits = "waiting for the kubelet: " if registry is None else ""
            self._status.set(self._name, f"{waits}{error}")
            self._say(f"{self._name}: {waits}{error}")
            return
        if reason:
            self._status.set(self._name, reason)
            return
        self._said.clear()
        count = _devices(len(self.offer.resource.offers()))
        self.offer.tell(f"{self._name}: registered with the kubelet, {count}")
        self._status.set(self._name, "")
        loop = asyncio.get_running_loop()
        began = loop.time()
        reason = await self._unless_moved(service, self._until_disconnected(service))
        is_steady = loop.time() - began > _STEADY
        self._pause = _FIRST_PAUSE if is_steady else min(self._pause, _SHORT_PAUSE)
        self._status.set(self._name, reason)
        self._say(f"{self._name}: {reason}; registering again")

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

    def _say(self, sentence: str) -> None:
        """Log a problem, each once until the next success."""
        if sentence not in self._said:
            self.offer.tell(sentence)
            self._said = [*self._said[-_REASONS:], sentence]

    async def _serve(self) -> _Service:
        """Return a server on a socket in the folder, without open streams."""
        now = self._service
        if now and not now.streams and now.is_in(self._folder):
            return now
        await self._close()
        new = _Service(self.offer, self._folder.prepare(self._name), self.notice)
        self._service = new
        await new.start(self._folder)
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
            resource_name=self._name,
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
        self.offer.tell(f"{self._name}: served on {service.name}, and not registered")
        while service.is_in(self._folder):
            await self._next()

    async def _next(self) -> None:
        self._moved.clear()
        await self._moved.wait()

    async def _until_disconnected(self, service: _Service) -> str:
        """Wait until the kubelet has no open stream; return that as a reason."""
        while service.streams:
            await self._next()
        return "the kubelet has ended the connection"

    async def _until_moved(self, service: _Service) -> str:
        """Wait until a socket was removed or replaced; return which as a reason."""
        while True:
            if not service.is_in(self._folder):
                return "its socket was removed"
            if self._folder.identity(api.REGISTRY) not in (None, self._registry):
                return "the kubelet's socket is a new one"
            await self._next()

    async def _rest(self) -> None:
        """Pause, longer each time, or until the kubelet's socket has changed."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._pause):
                while self._folder.identity(api.REGISTRY) in (None, self._registry):
                    await self._next()
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)


def _registration_error(error: Any, path: str) -> PluginError:
    if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        return PluginError(f"No kubelet answers at {path}", "Registering is retried until one does")
    return PluginError(
        f"The kubelet refuses to register it: {shown(error.details())}",
        "Registering is retried; see the kubelet's log",
    )


class _Server:
    """The server: all resources of the newest state, each with its endpoint."""

    def __init__(self, settings: Settings, states: int, tell: Tell, status: StatusFile) -> None:
        self._settings = settings
        self._states = states
        self._tell = tell
        self._file = status
        self._text = b""
        self._status = 0
        self._stop = asyncio.Event()
        self._folder = Folder(settings.kubelet_folder)
        self._wanted: dict[str, Resource] = {}
        self._endpoints: dict[str, _Endpoint] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> int:
        """Serve until stopped; return the exit status."""
        loop = asyncio.get_running_loop()
        with suppress(PluginError):  # reported again if it matters
            self._folder.sweep()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        os.set_blocking(self._states, False)
        loop.add_reader(self._states, self._read)
        if self._folder.events >= 0:
            loop.add_reader(self._folder.events, self._look)
        while not self._stop.is_set():
            self._look()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), _LOOK)
        loop.remove_reader(self._states)
        if self._folder.events >= 0:
            loop.remove_reader(self._folder.events)
        for task in self._tasks.values():
            task.cancel()
        if self._tasks:
            await asyncio.wait([*self._tasks.values()], timeout=_STOP)
        self._folder.close()
        return self._status

    def _look(self) -> None:
        """Make every endpoint check the folder."""
        self._file.keep()
        self._folder.watch()
        for endpoint in self._endpoints.values():
            endpoint.notice()

    def _read(self) -> None:
        """Read the supervisor's states, and use the newest; stop at the end of file."""
        try:
            piece = os.read(self._states, _PIECE)
        except ConnectionError:  # the supervisor has ended before it read a report
            piece = b""
        if not piece:
            self._stop.set()
            return
        lines, newline, self._text = (self._text + piece).rpartition(b"\n")
        try:
            if newline:
                state = State.from_line(lines.rpartition(b"\n")[2])
                self._wanted = {resource.name: resource for resource in state.resources}
            elif len(self._text) > _LINE:
                raise ValueError("it is too long")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            self._tell(f"A state from the supervisor is invalid: {error!r}")
            self._status = 1
            self._stop.set()
            return
        self._arrange()

    def _report(self, resource: str, seconds: float, failed: bool) -> None:
        """Send the supervisor what it counts; nothing while that reads nothing."""
        line = {"resource": resource, "seconds": seconds, "failed": failed}
        with suppress(OSError):
            os.write(self._states, json.dumps(line).encode() + b"\n")

    def _arrange(self) -> None:
        """Start and withdraw endpoints, so that each resource has one."""
        for name, endpoint in self._endpoints.items():
            if endpoint.withdrawn:
                continue
            if name in self._wanted:
                endpoint.offer.update(self._wanted[name])
            else:
                self._tell(f"{name}: withdrawn, because the host no longer has such devices")
                endpoint.withdrawn = True
                self._tasks[name].cancel()
        for name, resource in self._wanted.items():
            if name not in self._endpoints:
                endpoint = _Endpoint(resource, self._settings, self._folder, self._tell, self._file)
                if self._settings.metrics_listen:
                    endpoint.offer.report = self._report
                task = asyncio.create_task(endpoint.run(), name=name)
                self._endpoints[name], self._tasks[name] = endpoint, task
                task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Remove an endpoint that has ended; one that failed is started again."""
        name = task.get_name()
        del self._endpoints[name], self._tasks[name]
        if self._stop.is_set():
            return
        error = None if task.cancelled() else task.exception()
        if error is None:
            self._arrange()
            return
        self._tell(f"{name}: its server failed and is started again: {error!r}")
        asyncio.get_running_loop().call_later(_LONGEST_PAUSE, self._arrange)

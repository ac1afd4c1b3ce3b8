"""The server: registers drivers with the kubelet, and answers its calls about claims.

It is a child of the supervisor, which does the work: calls, responses and the node's state are
exchanged as lines (``work``). Each driver has two sockets, as a kubelet requires: its own, and one
in the registration folder that reports the path of the first. A lost socket is created again. The
server has one thread and one loop, in addition to the threads of gRPC and the publisher.
"""

import asyncio
import json
import os
import re
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import quote

from gpuhook.base.errors import PluginError, listed, shown
from gpuhook.cluster.device_plugin.folder import Folder, Identity
from gpuhook.cluster.dra import api
from gpuhook.cluster.dra.options import Options, short
from gpuhook.cluster.dra.publish import Publisher
from gpuhook.monitor import INSTALL
from gpuhook.monitor.host.child import Tell
from gpuhook.monitor.host.pages import give_back

# Set before gRPC is loaded: no child is forked here, and its log doesn't help an operator.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
try:
    import grpc
except ImportError as missing:
    raise PluginError(
        "The Python package grpcio isn't installed, and gpuhook needs it to talk to a kubelet",
        INSTALL,
    ) from missing

_ANSWER = 41.0  # seconds for a response of the supervisor; the kubelet waits for 45
_LOOK = 10.0  # seconds between polls of the folders; inotify reports most changes at once
_STARTED = 5.0  # seconds after which memory that only the start needs can be released
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 10.0  # seconds between two attempts
_END = 0.5  # seconds for calls to finish on their own
_STOP = 1.5  # seconds for the whole shutdown
_HEALTH_AGAIN = 30.0  # seconds after which unchanged health is sent again
_HEALTH_COUNTS = 100  # seconds after which a kubelet discards the reported health
_MOST = 107  # bytes of a socket's path
_LINE = 16 << 20  # bytes of a line, at most

Method = Callable[[Any, Any], Awaitable[Any]]


def serve(options: Options, publisher: Publisher | None, fd: int, tell: Tell) -> int:
    """Serve until the supervisor, at the descriptor's other end, has exited; return the status.

    ``publisher`` publishes meanwhile. ``tell`` gets a sentence for each message to the operator.
    Changes the umask of this process.
    """
    os.umask(0o077)  # only root may use the sockets
    asyncio.run(_Server(options, publisher, fd, tell).run())
    return 0


class _Supervisor:
    """The connection to the supervisor: calls as lines, and responses in any order."""

    def __init__(self, writer: asyncio.StreamWriter, say: Tell) -> None:
        self.say = say
        self._writer = writer
        self._number = 0
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}

    async def ask(self, do: str, driver: str, claim: Mapping[str, str]) -> dict[str, Any]:
        """Return the response for a claim; ``error`` is set if there is none in time."""
        self._number += 1
        number = self._number
        future = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        call = {"call": number, "do": do, "driver": driver, "claim": claim}
        self._writer.write(json.dumps(call).encode() + b"\n")
        try:
            async with asyncio.timeout(_ANSWER):
                found: dict[str, Any] = await future
                return found
        except TimeoutError:
            return {"error": f"There was no answer within {_ANSWER:g} seconds. It is tried again."}
        finally:
            del self._waiting[number]

    def answer(self, number: int, answer: dict[str, Any]) -> None:
        """Process a response; its call may have timed out already."""
        future = self._waiting.get(number)
        if future is not None and not future.done():
            future.set_result(answer)


class _Health:
    """The health of one driver's devices; streams wait for changes."""

    def __init__(self) -> None:
        self.devices: Sequence[Mapping[str, Any]] = ()
        self.news = asyncio.Event()  # set at a change, and then replaced

    def update(self, devices: Sequence[Mapping[str, Any]]) -> None:
        """Store a newer state."""
        if devices != self.devices:
            self.devices = devices
            self.wake()

    def wake(self) -> None:
        """Wake the streams, which then check for changes."""
        self.news.set()
        self.news = asyncio.Event()

    def message(self) -> Any:
        """Return the health of all devices as the kubelet's message."""
        answer = api.health.NodeWatchResourcesResponse()
        now = int(time.time())
        for each in self.devices:
            device = {"pool_name": each["pool"], "device_name": each["device"]}
            answer.devices.add(
                device=device,
                health=each["health"],
                last_updated_time=now,
                health_check_timeout_seconds=_HEALTH_COUNTS,
                message=each["message"][: api.LONGEST_MESSAGE],
            )
        return answer


class _Driver:
    """One driver, whose sockets ``run`` maintains."""

    def __init__(self, name: str, options: Options, supervisor: _Supervisor) -> None:
        self.name = name
        self.health = _Health()
        self._supervisor = supervisor
        own = short(options.instance)
        self._registry = Folder(options.registry)
        self._own = Folder(f"{options.plugins}/{name}")
        self._names = (
            f"{name}-{own}-reg.sock" if own else f"{name}-reg.sock",
            f"dra-{own}.sock" if own else "dra.sock",
        )
        self._servers: list[Any] = []
        self._identities: tuple[Identity | None, Identity | None] = (None, None)
        self._pause = _FIRST_PAUSE
        self._said = ""
        self._moved = asyncio.Event()
        self._ending = False

    @property
    def folders(self) -> tuple[Folder, Folder]:
        """The watched folders."""
        return self._registry, self._own

    def notice(self) -> None:
        """Check the folders after a change."""
        for folder in self.folders:
            folder.watch()
        self._moved.set()

    async def run(self) -> None:
        """Serve, with restarts; when cancelled, remove all sockets and return."""
        try:
            while True:
                try:
                    await self._serve()
                    await self._until_moved()
                    self._pause = _FIRST_PAUSE
                    self._say("its sockets were removed; they are created again")
                except PluginError as error:
                    self._say(str(error))
                    await asyncio.sleep(self._pause)
                    self._pause = min(2 * self._pause, _LONGEST_PAUSE)
                await self._close()
        finally:
            self._ending = True
            self.health.wake()
            await self._close()
            for folder in self.folders:
                if folder.events >= 0:
                    asyncio.get_running_loop().remove_reader(folder.events)
                folder.close()

    def _say(self, sentence: str) -> None:
        """Log a problem, once until it changes."""
        if sentence != self._said:
            self._supervisor.say(f"{self.name}: {sentence}")
            self._said = sentence

    async def _serve(self) -> None:
        """Create both sockets, the driver's own first: calls follow a registration immediately."""
        registry, own = self.folders
        with suppress(OSError):
            os.mkdir(own.path, 0o750)
        registry.sweep(re.compile(rf"{re.escape(self.name)}(-[0-9a-f]+)?-reg\.sock"))
        own.sweep(re.compile(r"dra(-[0-9a-f]+)?\.sock"))
        self.notice()
        for folder, name, handlers in (
            (own, self._names[1], self._services()),
            (registry, self._names[0], (self._registration(),)),
        ):
            path = f"{folder.path}/{folder.free(name)}"
            server = grpc.aio.server(handlers=handlers)
            self._servers.append(server)
            try:
                server.add_insecure_port(f"unix:{quote(path)}")
            except RuntimeError:
                raise PluginError(
                    f"The socket {path} can't be created",
                    "Run gpuhook dra as root, with this folder writable",
                ) from None
            await server.start()
        self._identities = self._now()

    def _now(self) -> tuple[Identity | None, Identity | None]:
        return self._registry.identity(self._names[0]), self._own.identity(self._names[1])

    async def _until_moved(self) -> None:
        """Wait until one of the sockets was removed or replaced."""
        while self._now() == self._identities:
            self._moved.clear()
            await self._moved.wait()

    async def _close(self) -> None:
        """Remove both sockets, the registration first: that is how a plugin unregisters."""
        while self._servers:
            await self._servers[-1].stop(_END)
            self._servers.pop()

    # What it serves ---------------------------------------------------------------------------

    def _registration(self) -> Any:
        parts = api.registration
        methods = {
            "GetInfo": _unary(self._reporting(self._info), parts.InfoRequest),
            "NotifyRegistrationStatus": _unary(
                self._reporting(self._registered), parts.RegistrationStatus
            ),
        }
        return grpc.method_handlers_generic_handler(api.REGISTRATION, methods)

    def _services(self) -> tuple[Any, ...]:
        parts = api.claims
        prepare = _unary(self._reporting(self._prepare), parts.NodePrepareResourcesRequest)
        unprepare = _unary(self._reporting(self._unprepare), parts.NodeUnprepareResourcesRequest)
        claims = {"NodePrepareResources": prepare, "NodeUnprepareResources": unprepare}
        watch = {
            "NodeWatchResources": grpc.unary_stream_rpc_method_handler(
                self._reporting(self._watch), response_serializer=_serialized
            )
        }
        return (
            *(grpc.method_handlers_generic_handler(each, claims) for each in api.PLUGINS.values()),
            *(grpc.method_handlers_generic_handler(each, watch) for each in api.HEALTH.values()),
        )

    def _reporting(self, method: Method) -> Method:
        """Return a method whose exceptions are logged: gRPC reports little."""

        async def reported(request: Any, context: Any) -> Any:
            try:
                return await method(request, context)
            except Exception as error:
                self._supervisor.say(f"{self.name}: a call failed: {error!r}")
                raise

        return reported

    async def _info(self, _request: Any, _context: Any) -> Any:
        return api.registration.PluginInfo(
            type=api.PLUGIN_TYPE,
            name=self.name,
            endpoint=f"{self._own.path}/{self._names[1]}",
            supported_versions=[*api.PLUGINS, *api.HEALTH],
        )

    async def _registered(self, request: Any, _context: Any) -> Any:
        if request.plugin_registered:
            self._said = ""
            self._supervisor.say(f"{self.name}: registered with the kubelet")
        else:
            self._say(f"the kubelet doesn't register it: {shown(request.error)}")
        return api.registration.RegistrationStatusResponse()

    async def _prepare(self, request: Any, _context: Any) -> Any:
        answer = api.claims.NodePrepareResourcesResponse()
        for uid, each in (await self._ask_all("prepare", request)).items():
            entry = answer.claims[uid]
            entry.error = each.get("error", "")
            for device in each.get("devices", ()) if not entry.error else ():
                entry.devices.add(
                    request_names=[device["request"]] if device["request"] else [],
                    pool_name=device["pool"],
                    device_name=device["device"],
                    cdi_device_ids=device["cdi"],
                    share_id=device["share"] or None,
                )
        return answer

    async def _unprepare(self, request: Any, _context: Any) -> Any:
        answer = api.claims.NodeUnprepareResourcesResponse()
        for uid, each in (await self._ask_all("unprepare", request)).items():
            answer.claims[uid].error = each.get("error", "")
        return answer

    async def _ask_all(self, do: str, request: Any) -> dict[str, dict[str, Any]]:
        """Return the response for each claim of a request, by uid: for exactly those claims.

        A request without claims is a probe, which checks whether the supervisor answers.
        """
        if not request.claims:
            await self._supervisor.ask(do, self.name, {})  # protects: dra-probe
        claims = {
            each.uid: {"namespace": each.namespace, "name": each.name, "uid": each.uid}
            for each in request.claims
        }
        asked = (self._supervisor.ask(do, self.name, claim) for claim in claims.values())
        answers = dict(zip(claims, await asyncio.gather(*asked), strict=True))
        for uid, answer in answers.items():
            claim = claims[uid]
            title = f"{self.name}: {do} claim {shown(claim['namespace'])}/{shown(claim['name'])}"
            devices = listed([each["device"] for each in answer.get("devices", ())]) or "done"
            self._supervisor.say(f"{title}: {answer.get('error') or devices}")
        return answers

    async def _watch(self, _request: bytes, context: Any) -> None:
        """Serve NodeWatchResources: send the health of all devices, at changes and periodically."""
        while not self._ending:
            news = self.health.news
            await context.write(self.health.message())
            with suppress(TimeoutError):
                await asyncio.wait_for(news.wait(), _HEALTH_AGAIN)


def _serialized(message: Any) -> bytes:
    text: bytes = message.SerializeToString()
    return text


def _unary(method: Method, request: Any) -> Any:
    return grpc.unary_unary_rpc_method_handler(
        method, request_deserializer=request.FromString, response_serializer=_serialized
    )


class _Server:
    """The servers of all drivers in the newest state."""

    def __init__(self, options: Options, publisher: Publisher | None, fd: int, tell: Tell) -> None:
        self._options = options
        self._publisher = publisher
        self._fd = fd
        self._tell = tell
        self._drivers: dict[str, _Driver] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Serve until the supervisor closes the connection."""
        line = socket.socket(fileno=self._fd)
        reader, writer = await asyncio.open_connection(sock=line, limit=_LINE)
        self._supervisor = _Supervisor(writer, self._tell)
        for number in (signal.SIGTERM, signal.SIGINT):  # as systemd sends to all processes
            asyncio.get_running_loop().add_signal_handler(number, reader.feed_eof)
        asyncio.get_running_loop().call_later(_STARTED, give_back)
        looking = asyncio.create_task(self._look_again())
        if self._publisher is not None:
            self._publisher.start()
        while text := await reader.readline():
            self._take_in(json.loads(text))
        if self._publisher is not None:
            self._publisher.stop()
        looking.cancel()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_STOP)
        writer.close()

    def _take_in(self, line: Mapping[str, Any]) -> None:
        if "call" in line:
            self._supervisor.answer(line["call"], line["answer"])
            return
        for name, devices in line["state"].items():
            if name not in self._drivers:
                self._begin(name)
            self._drivers[name].health.update(devices)
        if self._publisher is not None:
            self._publisher.want(line["slices"])

    def _begin(self, name: str) -> None:
        driver = _Driver(name, self._options, self._supervisor)
        if name in self._drivers:  # it failed; the supervisor sends only changes
            driver.health.update(self._drivers[name].health.devices)
        self._drivers[name] = driver
        for folder in driver.folders:
            if folder.events >= 0:
                asyncio.get_running_loop().add_reader(folder.events, driver.notice)
        task = asyncio.create_task(driver.run(), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Restart a driver that failed."""
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            name = task.get_name()
            self._supervisor.say(f"{name}: its server failed and is started again: {error!r}")
            asyncio.get_running_loop().call_later(_LONGEST_PAUSE, self._begin, name)

    async def _look_again(self) -> None:
        while True:
            await asyncio.sleep(_LOOK)
            for driver in self._drivers.values():
                driver.notice()

"""The server process: talks to the kubelet over gRPC, with an endpoint for each offered name.

It is a child of the supervisor. Both send lines of JSON: the supervisor states, the server calls
and reports. There is one thread and one loop; streams wait without a thread.

A kubelet's folders are watched with inotify(7), and polled where inotify reports nothing.
"""

import asyncio
import json
import operator
import os
import signal
import socket
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import quote

from gpuhook.base.container.clib import CLibrary
from gpuhook.base.errors import PluginError
from gpuhook.cluster.kubelet_endpoint import folder
from gpuhook.cluster.kubelet_endpoint.folder import Identity
from gpuhook.monitor.host.child import BackOff, Tell

# Set before gRPC is loaded: this process doesn't fork, and gRPC's own log doesn't help operators.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
import grpc

__all__ = ["Endpoint", "EndpointServer", "grpc"]

_PAUSES = (0.1, 10.0)  # seconds between two attempts: the first pause, the longest one
_SHORT = 1.0  # seconds before the first attempt after a success, at most
_STEADY = 10.0  # seconds after which an attempt counts as a success
_POLL = 5.0  # seconds between checks of the folders, most changes of which inotify reports
_END = 0.5  # seconds for streams to end by themselves
_REASONS = 16  # logged problems that are remembered, so that each is logged once
_LINE = 16 << 20  # bytes of a line, at most
_PIECE = 1 << 16  # bytes of events that are read at once
# sys/inotify.h: entries that are renamed, created or deleted, and the folder itself.
_CHANGES = 0xC0 | 0x100 | 0x200 | 0x400 | 0x800

Method = Callable[[Any, Any], Awaitable[Any]]

_libc = CLibrary()


class Endpoint(ABC):
    """A name at the kubelet, which ``task`` serves until it is cancelled.

    ``state`` is the newest one of the name, and ``news`` is set at each change of it, and
    replaced. ``is_ending`` tells streams to end; ``has_ended`` means that the task is cancelled.
    ``registry`` is the path of the kubelet's socket at which it registers ("": the kubelet finds it
    itself).
    """

    def __init__(self, name: str, server: "EndpointServer", registry: str = "") -> None:
        self.name = name
        self.state = server.wanted[name]
        self.news = asyncio.Event()
        self.is_ending = self.has_ended = False
        self._server = server
        self._registry = registry
        self._kubelet: Identity | None = None
        self._servers: list[Any] = []
        self._sockets: dict[str, Identity | None] = {}
        self._back_off = BackOff(*_PAUSES)
        self._said: deque[str] = deque(maxlen=_REASONS)
        self.task = asyncio.create_task(self._run(), name=name)

    @abstractmethod
    def _services(self) -> Mapping[str, Sequence[Any]]:
        """Return the services by the paths of their sockets, in the order of their start."""

    async def _keep(self) -> str:
        """Register, and return why the registration ended; PluginError if it fails."""
        await asyncio.Event().wait()
        return ""

    def update(self, state: Any) -> None:
        """Set a newer state."""
        if state != self.state:
            self.state = state
            self._wake()

    def withdraw(self) -> None:
        """End, because the supervisor no longer has the name."""
        self.tell("withdrawn, because the host no longer has such devices")
        self.end()

    def end(self) -> asyncio.Task[None]:
        """Cancel the task."""
        self.has_ended = True
        self.task.cancel()
        return self.task

    def _wake(self) -> None:
        self.news.set()
        self.news = asyncio.Event()

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait for a condition, which is checked whenever the server notices a change."""
        while not condition():
            await self._server.changed.wait()

    def tell(self, sentence: str) -> None:
        """Log a sentence about this name."""
        self._server.tell(f"{self.name}: {sentence}")

    def fail(self, reason: str) -> None:
        """Log a problem, each once until the next success."""
        if reason not in self._said:
            self.tell(reason)
            self._said.append(reason)

    def succeed(self, sentence: str) -> None:
        """Log a success."""
        self._back_off.pause = min(self._back_off.pause, _SHORT / 2)  # half the next one
        self._said.clear()
        self.tell(sentence)

    # The sockets ------------------------------------------------------------------------------

    async def _run(self) -> None:
        """Serve, with restarts; when cancelled, remove all sockets and return."""
        try:
            while True:
                began = time.monotonic()
                try:
                    reason = await self._serve()
                except PluginError as error:
                    reason = str(error)
                except Exception as error:  # noqa: BLE001 - one name's failure ends no other's
                    reason = f"its server failed and is started again: {error!r}"
                if self._is_new_kubelet() or time.monotonic() - began > _STEADY:
                    self._back_off.reset()
                self.fail(reason)
                await self._close()
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._back_off.grow()):
                        await self.until(self._is_new_kubelet)
        finally:
            await self._close()

    async def _serve(self) -> str:
        """Serve until a socket has changed or the registration has ended; return the reason."""
        self.is_ending = False
        self._kubelet = folder.identity(self._registry)
        for path, services in self._services().items():
            await self._start(path, services)
        keeping = asyncio.create_task(self._keep())
        keeping.add_done_callback(lambda _: self._server.notice())
        try:
            # A kubelet that starts meanwhile may wait for a socket that it just removed.
            await self.until(lambda: keeping.done() or self._change())
            return keeping.result() if keeping.done() else self._change()
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)

    async def _start(self, path: str, services: Sequence[Any]) -> None:
        """Start a server on a socket; PluginError if that fails."""
        folder.free(path)
        server = grpc.aio.server(handlers=services)
        self._servers.append(server)
        try:
            server.add_insecure_port(f"unix:{quote(path)}")
        except RuntimeError:
            raise PluginError(
                f"The socket {path} can't be created",
                "Run gpuhook as root, with this folder writable",
            ) from None
        await server.start()
        self._sockets[path] = folder.identity(path)

    def _change(self) -> str:
        """Return which socket has changed, "" for none."""
        for path, socket_identity in self._sockets.items():
            if socket_identity is None or socket_identity != folder.identity(path):
                return f"{path} was removed; it is created again"
        return "the kubelet's socket is a new one" if self._is_new_kubelet() else ""

    def _is_new_kubelet(self) -> bool:
        return folder.identity(self._registry) not in (None, self._kubelet)

    async def _close(self) -> None:
        """End all streams, and remove all sockets, the last one first."""
        self.is_ending = True
        self._wake()
        self._sockets.clear()
        while self._servers:
            await self._servers[-1].stop(_END)  # repeated if this is cancelled meanwhile
            self._servers.pop()

    def service(self, name: str, methods: Mapping[str, tuple[Method, Any]]) -> Any:
        """Return a gRPC service: each method with its request's class, None for a byte stream."""
        handlers = {each: self._handler(*methods[each]) for each in methods}
        return grpc.method_handlers_generic_handler(name, handlers)

    def _handler(self, method: Method, request: Any) -> Any:
        """Return a handler that logs failures, because gRPC's own reports are short."""

        async def reported(message: Any, context: Any) -> Any:
            try:
                return await method(message, context)
            except Exception as error:
                if not isinstance(error, grpc.aio.AbortError):
                    self.tell(f"a call failed: {error!r}")
                raise

        if request is None:
            return grpc.unary_stream_rpc_method_handler(reported)
        to_bytes = operator.methodcaller("SerializeToString")
        return grpc.unary_unary_rpc_method_handler(reported, request.FromString, to_bytes)


class EndpointServer(ABC):
    """All names of the newest state, each with its endpoint.

    ``wanted`` are the newest states by name, which ``_take`` sets from a line of the supervisor
    (ValueError, KeyError, TypeError, AttributeError for an invalid one). ``_make`` returns the
    endpoint of a name. ``folders`` are watched; ``changed`` is set at each change, and replaced.
    """

    def __init__(self, supervisor: int, tell: Tell, folders: Sequence[str]) -> None:
        self.tell = tell
        self.wanted: dict[str, Any] = {}
        self.folders = {*folders}
        self.changed = asyncio.Event()
        self._endpoints: dict[str, Endpoint] = {}
        self._supervisor = socket.socket(fileno=supervisor)
        self._events = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)  # -1: they are polled

    @abstractmethod
    def _take(self, line: bytes) -> None:
        """Process a line from the supervisor."""

    @abstractmethod
    def _make(self, name: str) -> Endpoint:
        """Return a new endpoint."""

    def run(self) -> int:
        """Serve until the supervisor ends or SIGTERM; return 0, or 1 for an invalid line.

        Changes this process's umask and signal handlers.
        """
        os.umask(0o077)  # only root may use the sockets
        return asyncio.run(self._run())

    async def _run(self) -> int:
        loop = asyncio.get_running_loop()
        reader, self._writer = await asyncio.open_connection(sock=self._supervisor, limit=_LINE)
        for number in (signal.SIGTERM, signal.SIGINT):  # as systemd sends to all processes
            loop.add_signal_handler(number, self._writer.transport.abort)
        if self._events >= 0:
            loop.add_reader(self._events, self._watch)
        polling = asyncio.create_task(self._poll())
        try:
            return await self._read(reader)
        finally:
            self._writer.transport.abort()
            self.wanted = {}
            tasks = [polling, *(each.end() for each in self._endpoints.values())]
            polling.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _poll(self) -> None:
        while True:
            self._watch()
            await asyncio.sleep(_POLL)

    def _watch(self) -> None:
        """Make every endpoint check its sockets, and watch the folders that are there now."""
        with suppress(OSError):  # there is no event
            os.read(self._events, _PIECE)
        for path in self.folders:
            _libc.inotify_add_watch(self._events, os.fsencode(path), _CHANGES)
        self.notice()

    def notice(self) -> None:
        """Make every endpoint check its sockets and streams again."""
        self.changed.set()
        self.changed = asyncio.Event()

    def send(self, line: Mapping[str, Any]) -> None:
        """Send the supervisor a line, as soon as it reads."""
        self._writer.write(json.dumps(line).encode() + b"\n")

    def count(self, labels: Sequence[str], began: float, *, failed: bool) -> None:
        """Report a call for the metrics, with when it began by the monotonic clock."""
        self.send({"labels": labels, "seconds": time.monotonic() - began, "failed": failed})

    async def _read(self, reader: asyncio.StreamReader) -> int:
        try:
            async for line in reader:
                if line.endswith(b"\n"):  # else the supervisor was killed
                    self._take(line)
                    self._arrange()
        except ConnectionError:  # the supervisor has ended before it read a report
            pass
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            self.tell(f"A state from the supervisor is invalid: {error!r}")
            return 1
        return 0

    def _arrange(self) -> None:
        """Start, update and withdraw endpoints, so that each name has one."""
        for name in [each for each in self.wanted if each not in self._endpoints]:
            self._endpoints[name] = self._make(name)
            self._endpoints[name].task.add_done_callback(self._ended)
        for name, endpoint in self._endpoints.items():
            if endpoint.has_ended:
                continue  # it is started again when its sockets are removed
            if name in self.wanted:
                endpoint.update(self.wanted[name])
            else:
                endpoint.withdraw()

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._endpoints[task.get_name()]
        self._arrange()

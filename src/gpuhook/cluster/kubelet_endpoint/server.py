"""The server process: talks to the kubelet over gRPC, with an endpoint for each offered name.

It is a child of the supervisor. Both send lines of JSON: the supervisor states, of which the last
one counts, the server reports and calls. There is one thread and one loop; streams wait without a
thread.
"""

import asyncio
import json
import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import quote

from gpuhook.base.errors import PluginError
from gpuhook.cluster.kubelet_endpoint.folder import Folder, Identity
from gpuhook.monitor import INSTALL
from gpuhook.monitor.host.child import BackOff, Tell

# Set before gRPC is loaded: this process doesn't fork, and gRPC's own log doesn't help operators.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
try:
    import grpc
except ImportError as missing:
    raise PluginError(
        "The Python package grpcio isn't installed, and gpuhook needs it to talk to a kubelet",
        INSTALL,
    ) from missing

__all__ = ["Endpoint", "EndpointServer", "Socket", "grpc", "run", "service"]

_PAUSES = (0.1, 10.0)  # seconds between two attempts: the first pause, the longest one
_AGAIN = 10.0  # seconds until an endpoint that failed is started again
_END = 0.5  # seconds for streams to end by themselves
_STOP = 1.5  # seconds for the whole shutdown
_REASONS = 16  # logged messages that are remembered, so that each is logged once
_PIECE = 1 << 16  # bytes that are read at once
_LINE = 16 << 20  # bytes of a line, at most

Method = Callable[[Any, Any], Awaitable[Any]]


def service(
    name: str, methods: Mapping[str, tuple[Method, Any]], streams: Mapping[str, Method], tell: Tell
) -> Any:
    """Return a gRPC service: ``methods`` with the class of their request, and ``streams`` of bytes.

    ``tell`` gets the errors of calls, because gRPC's own reports are short.
    """
    handlers = {
        each: grpc.unary_unary_rpc_method_handler(
            _reporting(method, tell),
            request_deserializer=request.FromString,
            response_serializer=lambda answer: answer.SerializeToString(),
        )
        for each, (method, request) in methods.items()
    }
    for each, method in streams.items():
        handlers[each] = grpc.unary_stream_rpc_method_handler(_reporting(method, tell))
    return grpc.method_handlers_generic_handler(name, handlers)


def _reporting(method: Method, tell: Tell) -> Method:
    async def reported(request: Any, context: Any) -> Any:
        try:
            return await method(request, context)
        except Exception as error:
            if not isinstance(error, grpc.aio.AbortError):
                tell(f"a call failed: {error!r}")
            raise

    return reported


class Socket:
    """A gRPC server on its own socket in a folder."""

    def __init__(self, folder: Folder, name: str, services: Sequence[Any]) -> None:
        self.name = name
        self._folder = folder
        self._identity: Identity | None = None
        self._server = grpc.aio.server(handlers=services)

    async def start(self) -> None:
        """Start serving; PluginError if that fails."""
        path = f"{self._folder.path}/{self.name}"
        try:
            self._server.add_insecure_port(f"unix:{quote(path)}")
        except RuntimeError:
            raise PluginError(
                f"The socket {path} can't be created",
                "Run gpuhook as root, with this folder writable",
            ) from None
        await self._server.start()
        self._identity = self._folder.identity(self.name)

    def is_there(self) -> bool:
        """Tell whether its socket exists: a starting kubelet may remove it at any time."""
        return self._identity is not None and self._identity == self._folder.identity(self.name)

    async def stop(self) -> None:
        """End the server, and remove the socket."""
        await self._server.stop(_END)


class Endpoint(ABC):
    """A name at the kubelet, for which ``run`` serves until it is cancelled.

    ``state`` is its newest one, and ``news`` is set at each change of that, and replaced.
    ``is_withdrawn`` means that the supervisor no longer has the name.
    """

    def __init__(self, name: str, state: Any, tell: Tell) -> None:
        self.name = name
        self.state = state
        self.news = asyncio.Event()
        self.is_withdrawn = False
        self._back_off = BackOff(*_PAUSES)
        self._tell = tell
        self._said: list[str] = []
        self._moved = asyncio.Event()

    @abstractmethod
    async def run(self) -> None:
        """Serve, with restarts; when cancelled, close everything."""

    def update(self, state: Any) -> None:
        """Set a newer state."""
        if state != self.state:
            self.state = state
            self.wake()

    def wake(self) -> None:
        """Wake the streams, which then check for changes."""
        self.news.set()
        self.news = asyncio.Event()

    def notice(self) -> None:
        """Check the sockets and the streams again after a change."""
        self._moved.set()

    async def _next(self) -> None:
        """Wait for the next change."""
        self._moved.clear()
        await self._moved.wait()

    def tell(self, sentence: str) -> None:
        """Log a sentence about this name."""
        self._tell(f"{self.name}: {sentence}")

    def _say(self, sentence: str) -> None:
        """Log a problem, each once until the next success, which clears ``_said``."""
        if sentence not in self._said:
            self.tell(sentence)
            self._said = [*self._said[-_REASONS:], sentence]


def run(server: Coroutine[Any, Any, int]) -> int:
    """Run a server in this process, whose umask and signal handlers change; return the status."""
    os.umask(0o077)  # only root may use the sockets
    return asyncio.run(server)


class EndpointServer(ABC):
    """All names of the newest state, each with its endpoint.

    ``wanted`` are the newest states by name, which ``_take`` sets from the supervisor's lines
    (ValueError, KeyError, TypeError, AttributeError for an invalid one). ``_make`` returns the
    endpoint of a name. ``poll`` is the seconds between checks of the folders; inotify reports most
    changes at once.
    """

    poll = 10.0

    def __init__(self, supervisor: int, tell: Tell) -> None:
        self.wanted: dict[str, Any] = {}
        self.endpoints: dict[str, Endpoint] = {}
        self._supervisor = supervisor
        self._tell = tell
        self._text = b""
        self._unsent = b""
        self._status = 0
        self._stop = asyncio.Event()
        self._folders: dict[str, Folder] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @abstractmethod
    def _take(self, lines: Sequence[bytes]) -> None:
        """Process lines from the supervisor."""

    @abstractmethod
    def _make(self, name: str) -> Endpoint:
        """Return a new endpoint."""

    async def run(self) -> int:
        """Serve until the supervisor ends or SIGTERM; return 0, or 1 for an invalid line."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):  # as systemd sends to all processes
            loop.add_signal_handler(number, self._stop.set)
        os.set_blocking(self._supervisor, False)
        loop.add_reader(self._supervisor, self._read)
        while not self._stop.is_set():
            self.notice()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), self.poll)
        loop.remove_reader(self._supervisor)
        for task in self._tasks.values():
            task.cancel()
        if self._tasks:
            await asyncio.wait([*self._tasks.values()], timeout=_STOP)
        for folder in self._folders.values():
            if folder.events >= 0:
                loop.remove_reader(folder.events)
            folder.close()
        return self._status

    def folder(self, path: str) -> Folder:
        """Return the folder at a path, whose changes every endpoint notices."""
        if path not in self._folders:
            folder = self._folders[path] = Folder(path)
            if folder.events >= 0:
                asyncio.get_running_loop().add_reader(folder.events, self.notice)
        return self._folders[path]

    def notice(self) -> None:
        """Make every endpoint check its folders."""
        for folder in self._folders.values():
            folder.watch()
        for endpoint in self.endpoints.values():
            endpoint.notice()

    def send(self, line: Mapping[str, Any]) -> None:
        """Send the supervisor a line, as soon as it reads."""
        self._unsent += json.dumps(line).encode() + b"\n"
        self._write()

    def _write(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            self._unsent = self._unsent[os.write(self._supervisor, self._unsent) :]
        except BlockingIOError:
            pass
        except OSError:  # it has ended, which ``_read`` notices
            self._unsent = b""
        if self._unsent:
            loop.add_writer(self._supervisor, self._write)
        else:
            loop.remove_writer(self._supervisor)

    def _read(self) -> None:
        """Process the supervisor's lines; stop at the end of file."""
        try:
            piece = os.read(self._supervisor, _PIECE)
        except ConnectionError:  # the supervisor has ended before it read a report
            piece = b""
        if not piece:
            self._stop.set()
            return
        *lines, self._text = (self._text + piece).split(b"\n")
        try:
            if len(self._text) > _LINE:
                raise ValueError("it is too long")
            if lines:
                self._take(lines)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            self._tell(f"A state from the supervisor is invalid: {error!r}")
            self._status = 1
            self._stop.set()
            return
        self._arrange()

    def _arrange(self) -> None:
        """Start and withdraw endpoints, so that each name has one."""
        if self._stop.is_set():
            return
        for name, endpoint in self.endpoints.items():
            if endpoint.is_withdrawn:
                continue
            if name in self.wanted:
                endpoint.update(self.wanted[name])
            else:
                endpoint.tell("withdrawn, because the host no longer has such devices")
                endpoint.is_withdrawn = True
                self._tasks[name].cancel()
        for name in self.wanted:
            if name not in self.endpoints:
                self.endpoints[name] = endpoint = self._make(name)
                self._tasks[name] = task = asyncio.create_task(endpoint.run(), name=name)
                task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Remove an endpoint that has ended; one that failed is started again."""
        name = task.get_name()
        del self.endpoints[name], self._tasks[name]
        error = None if task.cancelled() else task.exception()
        if error is None:
            self._arrange()
        elif not self._stop.is_set():
            self._tell(f"{name}: its server failed and is started again: {error!r}")
            asyncio.get_running_loop().call_later(_AGAIN, self._arrange)

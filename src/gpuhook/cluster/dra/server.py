"""The server: registers drivers with the kubelet, and answers its calls about claims.

It is a child of the supervisor, which does the work: calls, responses and the node's state are
exchanged as lines (``work``). Each driver has two sockets, as a kubelet requires: its own, and one
in the registration folder that reports the path of the first. A lost socket is created again. The
publisher has its own thread.
"""

import asyncio
import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from gpuhook.base.errors import PluginError, listed, shown
from gpuhook.cluster.dra import api
from gpuhook.cluster.dra.options import Options, short
from gpuhook.cluster.dra.publish import Publisher
from gpuhook.cluster.kubelet_endpoint.server import (
    Endpoint,
    EndpointServer,
    Socket,
    run,
    service,
)
from gpuhook.cluster.kubelet_endpoint.supervisor import give_back
from gpuhook.monitor.host.child import Tell

_ANSWER = 41.0  # seconds for a response of the supervisor; the kubelet waits for 45
_STARTED = 5.0  # seconds after which memory that only the start needs can be released
_HEALTH_AGAIN = 30.0  # seconds after which unchanged health is sent again
_HEALTH_COUNTS = 100  # seconds after which a kubelet discards the reported health


def serve(options: Options, publisher: Publisher | None, fd: int, tell: Tell) -> int:
    """Serve until the supervisor, at the descriptor's other end, has exited; return the status.

    ``publisher`` publishes meanwhile. ``tell`` gets a sentence for each message to the operator.
    """
    return run(_ClaimServer(options, publisher, fd, tell).run())


class _Supervisor:
    """Calls to the supervisor, as lines that ``send`` sends, and its responses in any order."""

    def __init__(self, send: Callable[[Mapping[str, Any]], None]) -> None:
        self._send = send
        self._number = 0
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}

    async def ask(self, do: str, driver: str, claim: Mapping[str, str]) -> dict[str, Any]:
        """Return the response for a claim; ``error`` is set if there is none in time."""
        self._number += 1
        number = self._number
        future = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        self._send({"call": number, "do": do, "driver": driver, "claim": claim})
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


def _health(devices: Sequence[Mapping[str, Any]]) -> bytes:
    """Return the health of all devices of a driver as the kubelet's message."""
    answer = api.health.NodeWatchResourcesResponse()
    now = int(time.time())
    for each in devices:
        device = {"pool_name": each["pool"], "device_name": each["device"]}
        answer.devices.add(
            device=device,
            health=each["health"],
            last_updated_time=now,
            health_check_timeout_seconds=_HEALTH_COUNTS,
            message=each["message"][: api.LONGEST_MESSAGE],
        )
    text: bytes = answer.SerializeToString()
    return text


class _Driver(Endpoint):
    """One driver, whose sockets ``run`` maintains; the state is its devices' health."""

    def __init__(
        self, name: str, server: "_ClaimServer", options: Options, supervisor: _Supervisor
    ) -> None:
        super().__init__(name, server.wanted[name], server.tell)
        self._supervisor = supervisor
        own = short(options.instance)
        self._registry = server.folder(options.registry)
        self._own = server.folder(f"{options.plugins}/{name}")
        self._names = (
            f"{name}-{own}-reg.sock" if own else f"{name}-reg.sock",
            f"dra-{own}.sock" if own else "dra.sock",
        )
        self._sockets: list[Socket] = []
        self._ending = False

    async def run(self) -> None:
        """Serve, with restarts; when cancelled, remove all sockets and return."""
        try:
            while True:
                try:
                    await self._serve()
                    while all(socket.is_there() for socket in self._sockets):
                        await self._next()
                    self._back_off.reset()
                    self._say("its sockets were removed; they are created again")
                except PluginError as error:
                    self._say(str(error))
                    await asyncio.sleep(self._back_off.grow())
                await self._close()
        finally:
            self._ending = True
            self.wake()
            await self._close()

    async def _serve(self) -> None:
        """Create both sockets, the driver's own first: calls follow a registration immediately."""
        with suppress(OSError):
            os.mkdir(self._own.path, 0o750)
        self._registry.sweep(re.compile(rf"{re.escape(self.name)}(-[0-9a-f]+)?-reg\.sock"))
        self._own.sweep(re.compile(r"dra(-[0-9a-f]+)?\.sock"))
        self._own.watch()
        for folder, name, services in (
            (self._own, self._names[1], self._services()),
            (self._registry, self._names[0], [self._registration()]),
        ):
            self._sockets.append(Socket(folder, folder.free(name), services))
            await self._sockets[-1].start()

    async def _close(self) -> None:
        """Remove both sockets, the registration first: that is how a plugin unregisters."""
        while self._sockets:
            await self._sockets[-1].stop()
            self._sockets.pop()

    # What it serves ---------------------------------------------------------------------------

    def _registration(self) -> Any:
        parts = api.registration
        methods = {
            "GetInfo": (self._info, parts.InfoRequest),
            "NotifyRegistrationStatus": (self._registered, parts.RegistrationStatus),
        }
        return service(api.REGISTRATION, methods, {}, self.tell)

    def _services(self) -> list[Any]:
        parts = api.claims
        claims = {
            "NodePrepareResources": (self._prepare, parts.NodePrepareResourcesRequest),
            "NodeUnprepareResources": (self._unprepare, parts.NodeUnprepareResourcesRequest),
        }
        watch = {"NodeWatchResources": self._watch}
        return [
            *(service(each, claims, {}, self.tell) for each in api.PLUGINS.values()),
            *(service(each, {}, watch, self.tell) for each in api.HEALTH.values()),
        ]

    async def _info(self, _request: Any, _context: Any) -> Any:
        return api.registration.PluginInfo(
            type=api.PLUGIN_TYPE,
            name=self.name,
            endpoint=f"{self._own.path}/{self._names[1]}",
            supported_versions=[*api.PLUGINS, *api.HEALTH],
        )

    async def _registered(self, request: Any, _context: Any) -> Any:
        if request.plugin_registered:
            self._said.clear()
            self.tell("registered with the kubelet")
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
            title = f"{do} claim {shown(claim['namespace'])}/{shown(claim['name'])}"
            devices = listed([each["device"] for each in answer.get("devices", ())]) or "done"
            self.tell(f"{title}: {answer.get('error') or devices}")
        return answers

    async def _watch(self, _request: bytes, context: Any) -> None:
        """Serve NodeWatchResources: send the health of all devices, at changes and periodically."""
        while not self._ending:
            news = self.news
            await context.write(_health(self.state))
            with suppress(TimeoutError):
                await asyncio.wait_for(news.wait(), _HEALTH_AGAIN)


class _ClaimServer(EndpointServer):
    """The server of all drivers, which also publishes devices."""

    def __init__(self, options: Options, publisher: Publisher | None, fd: int, tell: Tell) -> None:
        super().__init__(fd, tell)
        self.tell = tell
        self._options = options
        self._publisher = publisher
        self._calls = _Supervisor(self.send)

    async def run(self) -> int:
        """Serve, and publish."""
        asyncio.get_running_loop().call_later(_STARTED, give_back)
        if self._publisher is None:
            return await super().run()
        self._publisher.start()
        try:
            return await super().run()
        finally:
            self._publisher.stop()

    def _take(self, lines: Sequence[bytes]) -> None:
        for line in map(json.loads, lines):
            if "call" in line:
                self._calls.answer(line["call"], line["answer"])
                continue
            self.wanted = line["state"]
            if self._publisher is not None:
                self._publisher.want(line["slices"])

    def _make(self, name: str) -> Endpoint:
        return _Driver(name, self, self._options, self._calls)

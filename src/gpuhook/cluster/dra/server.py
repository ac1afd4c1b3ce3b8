"""The server: registers drivers with the kubelet, and answers its calls about claims.

It is a child of the supervisor, which does the work: calls, responses and the node's state are
exchanged as lines (``work``). Each driver has two sockets, as a kubelet requires: its own, and one
in the registration folder that reports the path of the first. The publisher has its own thread.
"""

import asyncio
import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

from gpuhook.base.errors import listed, shown
from gpuhook.cluster.dra import api
from gpuhook.cluster.dra.options import DraOptions, short
from gpuhook.cluster.dra.publish import Publisher
from gpuhook.cluster.kubelet_endpoint import folder
from gpuhook.cluster.kubelet_endpoint.server import Endpoint, EndpointServer
from gpuhook.cluster.kubelet_endpoint.supervisor import give_back
from gpuhook.monitor.host.child import Tell

_STARTED = 5.0  # seconds after which memory that only the start needs can be released
_HEALTH_AGAIN = 30.0  # seconds after which unchanged health is sent again
_HEALTH_COUNTS = 100  # seconds after which a kubelet discards the reported health


def _health(devices: Sequence[Mapping[str, Any]]) -> bytes:
    """Return the health of all devices of a driver as the kubelet's message."""
    answer = api.health.NodeWatchResourcesResponse()
    now = int(time.time())
    for each in devices:
        answer.devices.add(
            device={"pool_name": each["pool"], "device_name": each["device"]},
            health=each["health"],
            last_updated_time=now,
            health_check_timeout_seconds=_HEALTH_COUNTS,
            message=each["message"][: api.LONGEST_MESSAGE],
        )
    return bytes(answer.SerializeToString())


class _Driver(Endpoint):
    """One driver; the state is its devices' health."""

    _server: "ClaimServer"

    def __init__(self, name: str, server: "ClaimServer") -> None:
        super().__init__(name, server)
        options, own = server.options, short(server.options.instance)
        self._folders = f"{options.plugins}/{name}", options.registry
        server.folders.update(self._folders)
        self._own = f"{self._folders[0]}/{f'dra-{own}.sock' if own else 'dra.sock'}"
        self._registration = f"{options.registry}/{name}{f'-{own}' if own else ''}-reg.sock"

    def _services(self) -> Mapping[str, Sequence[Any]]:
        """Return both services, the driver's own first: calls follow a registration immediately.

        The registration ends first: that is how a plugin unregisters.
        """
        plugins, registry = self._folders
        with suppress(OSError):
            os.mkdir(plugins, 0o750)
        folder.sweep(registry, rf"{re.escape(self.name)}(-[0-9a-f]+)?-reg\.sock")
        folder.sweep(plugins, r"dra(-[0-9a-f]+)?\.sock")
        registration = {
            "GetInfo": (self._info, api.registration.InfoRequest),
            "NotifyRegistrationStatus": (self._registered, api.registration.RegistrationStatus),
        }
        claims = {
            "NodePrepareResources": (self._prepare, api.claims.NodePrepareResourcesRequest),
            "NodeUnprepareResources": (self._unprepare, api.claims.NodeUnprepareResourcesRequest),
        }
        watch = {"NodeWatchResources": (self._watch, None)}
        services = [
            *(self.service(each, claims) for each in api.PLUGINS.values()),
            *(self.service(each, watch) for each in api.HEALTH.values()),
        ]
        register = self.service(api.REGISTRATION, registration)
        return {self._own: services, self._registration: [register]}

    async def _info(self, _request: Any, _context: Any) -> Any:
        return api.registration.PluginInfo(
            type=api.PLUGIN_TYPE,
            name=self.name,
            endpoint=self._own,
            supported_versions=[*api.PLUGINS, *api.HEALTH],
        )

    async def _registered(self, request: Any, _context: Any) -> Any:
        if request.plugin_registered:
            self.succeed("registered with the kubelet")
        else:
            self.fail(f"the kubelet doesn't register it: {shown(request.error)}")
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
            await self._server.ask(do, self.name, {})  # protects: dra-probe
        claims = {
            each.uid: {"namespace": each.namespace, "name": each.name, "uid": each.uid}
            for each in request.claims
        }
        asked = (self._ask(do, claim) for claim in claims.values())
        return dict(zip(claims, await asyncio.gather(*asked), strict=True))

    async def _ask(self, do: str, claim: Mapping[str, str]) -> dict[str, Any]:
        """Return the response for a claim, which is logged and counted."""
        began = time.monotonic()
        answer = await self._server.ask(do, self.name, claim)
        devices = listed([each["device"] for each in answer.get("devices", ())]) or "done"
        title = f"{do} claim {shown(claim['namespace'])}/{shown(claim['name'])}"
        self.tell(f"{title}: {answer.get('error') or devices}")
        self._server.count([self.name, do], began, failed="error" in answer)
        return answer

    async def _watch(self, _request: bytes, context: Any) -> None:
        """Serve NodeWatchResources: send the health of all devices, at changes and periodically."""
        while not self.is_ending:
            news = self.news
            await context.write(_health(self.state))
            with suppress(TimeoutError):
                await asyncio.wait_for(news.wait(), _HEALTH_AGAIN)


class ClaimServer(EndpointServer):
    """The server of all drivers; ``publisher`` publishes their devices meanwhile."""

    def __init__(
        self, options: DraOptions, publisher: Publisher | None, supervisor: int, tell: Tell
    ) -> None:
        super().__init__(supervisor, tell, ())
        self.options = options
        self._publisher = publisher
        self._number = 0  # of the last call to the supervisor
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}

    async def _run(self) -> int:
        asyncio.get_running_loop().call_later(_STARTED, give_back)
        with ExitStack() as stack:
            if self._publisher is not None:
                self._publisher.start()
                stack.callback(self._publisher.stop)
            return await super()._run()

    def _take(self, line: bytes) -> None:
        received = json.loads(line)
        if "call" not in received:
            self.wanted = received["state"]
            if self._publisher is not None:
                self._publisher.want(received["slices"])
            return
        answer = self._waiting.get(received["call"])
        if answer is not None and not answer.done():  # else the kubelet has given up
            answer.set_result(received["answer"])

    def _make(self, name: str) -> Endpoint:
        return _Driver(name, self)

    async def ask(self, do: str, driver: str, claim: Mapping[str, str]) -> dict[str, Any]:
        """Return the supervisor's response for a claim; the kubelet limits the time."""
        self._number += 1
        number = self._number
        self._waiting[number] = asyncio.get_running_loop().create_future()
        self.send({"call": number, "do": do, "driver": driver, "claim": claim})
        try:
            return await self._waiting[number]
        finally:
            del self._waiting[number]

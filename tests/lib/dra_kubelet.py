"""A kubelet as DRA plugins see one: its registry, its calls, and its rules.

It behaves like the kubelet's plugin watcher and DRA manager (pkg/kubelet/pluginmanager, cm/dra
of Kubernetes). It looks for sockets in the folder of registrations, asks each plugin for its
name and its services, and reports the result to the plugin. It calls the newest instance of a
driver. A claim that the answer lacks, or that wasn't asked for, fails the pod. Messages are
read and written by hand.
"""

import contextlib
import os
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

import grpc
import wire

DEADLINE_S = 45  # seconds for a call, as in the kubelet
PATIENCE_S = 300  # seconds that a test waits, enough on a busy machine
POLL_S = 0.02
_CHANNEL = (("grpc.use_local_subchannel_pool", 1), ("grpc.default_authority", "localhost"))
REGISTRATION = "/pluginregistration.Registration/"
PLUGINS = {
    "v1.DRAPlugin": "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/",
    "v1beta1.DRAPlugin": "/k8s.io.kubelet.pkg.apis.dra.v1beta1.DRAPlugin/",
}
HEALTH = {
    "v1.DRAResourceHealth": "/v1.DRAResourceHealth/",
    "v1alpha1.DRAResourceHealth": "/v1alpha1.DRAResourceHealth/",
}
UNKNOWN, HEALTHY, UNHEALTHY = 0, 1, 2


class PodError(Exception):
    """The kubelet's reason not to start a pod."""


class Claim(NamedTuple):
    """A claim as the kubelet names it."""

    namespace: str
    name: str
    uid: str


class Device(NamedTuple):
    """A device in a plugin's answer."""

    requests: list[str]
    pool: str
    name: str
    cdi: list[str]
    share: str


class DeviceHealth(NamedTuple):
    """State of a device."""

    health: int
    message: str
    updated: int
    counts: int


@dataclass
class Plugin:
    """An instance of a driver that has registered."""

    name: str
    socket: Path
    endpoint: str
    versions: list[str]
    channel: Any
    service: str
    gone: bool = False
    devices: dict[tuple[str, str], DeviceHealth] = field(default_factory=dict)
    lists: int = 0

    def call(self, method: str, request: bytes, timeout: float = DEADLINE_S) -> bytes:
        """Return the plugin's answer to a call; grpc.RpcError if there is none."""
        answer: bytes = self.channel.unary_unary(self.service + method)(request, timeout=timeout)
        return answer


class DraKubelet:
    """A kubelet with its two folders, which outlast it; ``knows`` are the services that it calls.

    It is safe to use from several threads. It stops at the end of the block, if it is used in
    one.
    """

    def __init__(self, folder: Path, knows: Sequence[str] = (*PLUGINS, *HEALTH)) -> None:
        self.registry = folder / "reg"
        self.plugins = folder / "plugins"
        self.knows = knows
        self.refuse = ""
        self._seen: dict[Path, tuple[tuple[int, int, int], Plugin | None]] = {}
        self._changed = threading.Condition()
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Make the folders, and look for plugins."""
        for each in (self.registry, self.plugins):
            each.mkdir(mode=0o750, parents=True, exist_ok=True)
        self._end.clear()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Disconnect from all plugins, and stop looking for new ones."""
        self._end.set()
        if self._thread is not None:
            self._thread.join()
        for path in [*self._seen]:
            self._forget(path)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # Registration -----------------------------------------------------------------------------

    def _look(self) -> None:
        while not self._end.wait(POLL_S):
            found = {}
            with contextlib.suppress(FileNotFoundError):
                for path in self.registry.iterdir():
                    with contextlib.suppress(FileNotFoundError):
                        status = path.lstat()
                        if stat.S_ISSOCK(status.st_mode):
                            found[path] = (status.st_dev, status.st_ino, status.st_ctime_ns)
            for path, (identity, _) in [*self._seen.items()]:
                if found.get(path) != identity:
                    self._forget(path)
            for path, identity in found.items():
                if path not in self._seen:
                    with contextlib.suppress(grpc.RpcError, grpc.FutureTimeoutError):
                        plugin = self._register(path)
                        with self._changed:
                            self._seen[path] = (identity, plugin)
                            self._changed.notify_all()

    def _forget(self, path: Path) -> None:
        with self._changed:
            _, plugin = self._seen.pop(path)
            if plugin is not None:
                plugin.gone = True
                plugin.channel.close()
            self._changed.notify_all()

    def _register(self, path: Path) -> Plugin | None:
        with grpc.insecure_channel(f"unix:{path}", options=_CHANNEL) as channel:
            info = channel.unary_unary(REGISTRATION + "GetInfo")(b"", timeout=5)
            kind, name, endpoint = (wire.string(info, number) for number in (1, 2, 3))
            versions = wire.strings(info, 4)
            assert kind == "DRAPlugin", kind
            error = self.refuse
            service = next(
                (each for each in versions if each in self.knows and each in PLUGINS), ""
            )
            if not error and not service:
                error = f"no supported service in {versions}"
            status = wire.message((1, int(not error)), (2, error))
            channel.unary_unary(REGISTRATION + "NotifyRegistrationStatus")(status, timeout=5)
        if error:
            return None
        connection = grpc.insecure_channel(f"unix:{endpoint}", options=_CHANNEL)
        plugin = Plugin(name, path, endpoint, versions, connection, PLUGINS[service])
        watch = next((each for each in versions if each in self.knows and each in HEALTH), "")
        if watch:
            threading.Thread(target=self._listen, args=(plugin, HEALTH[watch]), daemon=True).start()
        return plugin

    def _listen(self, plugin: Plugin, service: str) -> None:
        """Read the health of the devices again and again, until the plugin is gone."""
        while not plugin.gone:
            with contextlib.suppress(grpc.RpcError, ValueError):
                for text in plugin.channel.unary_stream(service + "NodeWatchResources")(b""):
                    found = {}
                    for each in wire.messages(text, 1):
                        device = wire.messages(each, 1)[0]
                        numbers = (wire.integer(each, number) for number in (3, 4))
                        key = wire.string(device, 1), wire.string(device, 2)
                        health = wire.integer(each, 2)
                        found[key] = DeviceHealth(health, wire.string(each, 5), *numbers)
                    with self._changed:
                        plugin.devices, plugin.lists = found, plugin.lists + 1
                        self._changed.notify_all()
            time.sleep(POLL_S)

    # What it asks -----------------------------------------------------------------------------

    def instances(self, driver: str) -> list[Plugin]:
        """Return the registered instances of a driver, the newest last."""
        with self._changed:
            every = [plugin for _, plugin in self._seen.values()]
            return [each for each in every if each is not None and each.name == driver]

    def wait(self, driver: str, count: int = 1) -> Plugin:
        """Wait until a driver has ``count`` instances; return the newest."""
        self.wait_until(lambda: len(self.instances(driver)) == count, f"{count} of {driver}")
        return self.instances(driver)[-1]

    def wait_until(self, condition: Any, what: str, seconds: float = PATIENCE_S) -> None:
        """Wait until ``condition()`` holds; fail after a while."""
        with self._changed:
            end = time.monotonic() + seconds
            while not condition():
                self._changed.wait(0.05)
                assert time.monotonic() < end, f"{what}: not within {seconds} s"

    def prepare(
        self, driver: str, *claims: Claim, plugin: Plugin | None = None
    ) -> dict[str, list[Device] | str]:
        """Return the prepared devices or the error of each claim, by uid.

        PodError for a wrong answer.
        """
        text = self._ask(plugin or self.wait(driver), "NodePrepareResources", claims)
        found: dict[str, list[Device] | str] = {}
        for uid, answer in self._answers(text, claims):
            error = wire.string(answer, 2)
            devices = [
                Device(
                    wire.strings(each, 1),
                    wire.string(each, 2),
                    wire.string(each, 3),
                    wire.strings(each, 4),
                    wire.string(each, 5),
                )
                for each in wire.messages(answer, 1)
            ]
            found[uid] = error or devices
        return found

    def unprepare(
        self, driver: str, *claims: Claim, plugin: Plugin | None = None
    ) -> dict[str, str]:
        """Return the error of each claim by uid, "" for a released claim."""
        text = self._ask(plugin or self.wait(driver), "NodeUnprepareResources", claims)
        return {uid: wire.string(answer, 1) for uid, answer in self._answers(text, claims)}

    def _ask(self, plugin: Plugin, method: str, claims: Sequence[Claim]) -> bytes:
        request = wire.message(
            *(
                (1, wire.message((1, each.namespace), (2, each.uid), (3, each.name)))
                for each in claims
            )
        )
        try:
            return plugin.call(method, request)
        except (grpc.RpcError, ValueError) as error:
            raise PodError(f"{method} failed: {error}") from None

    def _answers(self, text: bytes, claims: Sequence[Claim]) -> Iterator[tuple[str, bytes]]:
        entries = [
            (wire.string(entry, 1), (wire.messages(entry, 2) or [b""])[-1])
            for entry in wire.messages(text, 1)
        ]
        unknown = {uid for uid, _ in entries} - {each.uid for each in claims}
        if unknown:
            raise PodError(f"result for unknown claim UID {unknown}")
        if len(entries) < len({each.uid for each in claims}):
            raise PodError(f"skipped {len(claims) - len(entries)} ResourceClaims")
        yield from entries

    def wipe(self) -> None:
        """Remove the content of both folders, like an administrator who starts from nothing."""
        for folder in (self.registry, self.plugins):
            for path, _, names in os.walk(folder, topdown=False):
                for name in names:
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(f"{path}/{name}")
                if Path(path) != folder:
                    os.rmdir(path)

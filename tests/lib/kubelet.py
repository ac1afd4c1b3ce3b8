"""A kubelet as device plugins see one: its registry, calls, bookkeeping and faults.

It behaves like the kubelet's device manager (pkg/kubelet/cm/devicemanager of Kubernetes). At
its start it removes every socket of the folder, and then makes its own. Inside Register it
connects back to the plugin. Each message of ListAndWatch replaces the list. When a stream
ends, all devices count as unhealthy and the resource remains. Ids come in random order. A
container's allocation is in a checkpoint and isn't requested again. Messages are read and
written by hand.
"""

import base64
import contextlib
import json
import os
import random
import re
import socket
import stat
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self, TypedDict

import grpc
import wire

VERSION = "v1beta1"
REGISTRY, CHECKPOINT = "kubelet.sock", "kubelet_internal_checkpoint"
PLUGIN = "/v1beta1.DevicePlugin/"
DIAL_S = 10  # seconds that the kubelet waits for a plugin that is registering
PATIENCE_S = 300  # seconds that a test waits, enough on a busy machine
NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?")
# gRPC must not share connections between channels: a shared one would wait after failures of an
# earlier one.
_CHANNEL = (("grpc.use_local_subchannel_pool", 1), ("grpc.default_authority", "localhost"))


class AdmissionError(Exception):
    """The kubelet's reason not to admit a pod (UnexpectedAdmissionError)."""


class Mount(NamedTuple):
    """A mount in a plugin's answer."""

    container: str
    host: str
    read_only: bool


class Node(NamedTuple):
    """A device node in a plugin's answer."""

    container: str
    host: str
    permissions: str


class Answers(TypedDict):
    """Start parameters of a container: the answers for all of its resources, merged."""

    ids: dict[str, list[str]]  # by resource
    envs: dict[str, str]
    mounts: list[Mount]
    devices: list[Node]
    annotations: dict[str, str]
    cdi_devices: list[str]


@dataclass(frozen=True)
class Device:
    """A device as a plugin has listed it."""

    id: str
    healthy: bool
    numa: tuple[int, ...] = ()


@dataclass
class Endpoint:
    """A plugin that has registered one resource.

    ``calls`` are the calls to it: method, request. ``lists`` counts the received messages.
    ``connected`` becomes false when the stream ends.
    """

    resource: str
    socket: Path
    channel: Any
    prefers: bool
    connected: bool = True
    ended: str = ""  # the status code that ended the stream
    lists: int = 0
    devices: dict[str, Device] = field(default_factory=dict)
    stream: Any = None

    def call(self, method: str, request: bytes, timeout: float = DIAL_S) -> bytes:
        """Return a plugin's answer; grpc.RpcError if it refuses."""
        try:
            answer: bytes = self.channel.unary_unary(PLUGIN + method)(request, timeout=timeout)
        except ValueError:  # gRPC raises it if the channel has been closed meanwhile
            raise AdmissionError(f"endpoint {self.resource} has been stopped") from None
        return answer


@dataclass(frozen=True)
class Registration:
    """A call of Register: the fields of the request, and its time by the monotonic clock."""

    version: str
    endpoint: str
    resource: str
    prefers: bool
    moment: float


def sockets(folder: Path) -> list[Path]:
    """Return the sockets of a folder, regardless of their creator and of listeners."""
    found = []
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISSOCK(path.lstat().st_mode):
                found.append(path)
    return sorted(found)


class Kubelet:
    """A kubelet with its folder for device plugins, which is the only part that outlasts it.

    ``refuse`` is the error that Register returns instead of doing its work. ``delay`` is the
    time that Register takes, in seconds. ``version`` is the API version that it knows.
    ``registrations`` are all registrations, including refused ones. ``messages`` counts the
    lists since the beginning. ``calls`` has (method, resource, ids) of each call to a plugin.
    ``chance`` decides orders. The kubelet is safe to use from several threads. It starts with
    ``start``, and stops at the end of the block, if it is used in one.
    """

    def __init__(self, folder: Path, seed: int = 1) -> None:
        self.folder = folder
        self.refuse = ""
        self.delay = 0.0
        self.version = VERSION
        self.registrations: list[Registration] = []
        self.calls: list[tuple[str, str, list[str]]] = []
        self.messages = 0
        self.chance = random.Random(seed)  # noqa: S311 - an order, no secret
        self._endpoints: dict[str, Endpoint] = {}
        self._pods: dict[str, Answers] = {}
        self._changed = threading.Condition()
        self._reads = threading.Lock()
        self._server: Any = None
        self._life: object = None  # a new object for each start

    # Its life ------------------------------------------------------------------------------

    def start(self) -> None:
        """Make the folder, remove all sockets in it, read the checkpoint and serve the registry."""
        assert self._server is None, "it runs"
        self.folder.mkdir(mode=0o750, parents=True, exist_ok=True)
        for path in sockets(self.folder):
            path.unlink(missing_ok=True)
        self._read_checkpoint()
        self._life = life = object()
        handlers = {
            "Register": grpc.unary_unary_rpc_method_handler(
                lambda request, context: self._register(request, context, life)
            )
        }
        service = grpc.method_handlers_generic_handler("v1beta1.Registration", handlers)
        self._server = grpc.server(ThreadPoolExecutor(8))
        self._server.add_generic_rpc_handlers((service,))
        # gRPC removes the socket of a server that stops, but a kubelet leaves it. So gRPC uses
        # another path, and the kubelet's socket is a hard link to it.
        live = self._live()
        live.unlink(missing_ok=True)
        self._server.add_insecure_port(f"unix:{live}")
        self._server.start()
        os.link(live, self.folder / REGISTRY)

    def stop(self) -> None:
        """Stop like a kubelet: streams break, and kubelet.sock remains without a listener."""
        if self._server is None:
            return
        with self._changed:
            self._life = None
            endpoints, self._endpoints = self._endpoints, {}
        for each in endpoints.values():
            each.stream.cancel()  # its listener thread then closes the channel, a bit later
        self._server.stop(0).wait()
        self._server = None
        self._live().unlink(missing_ok=True)

    def restart(self) -> None:
        """Stop and start again: registrations are lost, allocations are kept."""
        self.stop()
        self.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _live(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.live")

    # Registration --------------------------------------------------------------------------

    def _register(self, request: bytes, context: Any, life: object) -> bytes:
        options = (wire.messages(request, 4) or [b""])[-1]
        version, endpoint, resource = (wire.string(request, number) for number in (1, 2, 3))
        prefers = bool(wire.integer(options, 2))
        with self._changed:
            moment = time.monotonic()
            self.registrations.append(Registration(version, endpoint, resource, prefers, moment))
            self._changed.notify_all()
        time.sleep(self.delay)
        if self.refuse:
            context.abort(grpc.StatusCode.UNKNOWN, self.refuse)
        if version != self.version:
            context.abort(grpc.StatusCode.UNKNOWN, f'requested API version "{version}" is unknown')
        if not NAME.fullmatch(resource) or "kubernetes.io/" in resource:
            context.abort(grpc.StatusCode.UNKNOWN, f'the ResourceName "{resource}" is invalid')
        try:
            self._connect(resource, self.folder / endpoint, life)
        except (grpc.FutureTimeoutError, grpc.RpcError) as error:
            context.abort(grpc.StatusCode.UNKNOWN, f"failed to dial device plugin: {error!r}")
        return b""

    def _connect(self, resource: str, path: Path, life: object) -> None:
        channel = grpc.insecure_channel(f"unix:{path}", options=_CHANNEL)
        try:
            grpc.channel_ready_future(channel).result(DIAL_S)
            ask = channel.unary_unary(PLUGIN + "GetDevicePluginOptions")
            options = ask(b"", timeout=DIAL_S)
        except BaseException:
            channel.close()
            raise
        new = Endpoint(resource, path, channel, bool(wire.integer(options, 2)))
        new.stream = channel.unary_stream(PLUGIN + "ListAndWatch")(b"")
        with self._changed:
            if self._life is not life:  # the kubelet has stopped or restarted meanwhile
                channel.close()
                return
            old = self._endpoints.get(resource)
            self._endpoints[resource] = new
            self._changed.notify_all()
        threading.Thread(target=self._listen, args=(new, old), daemon=True).start()

    def _listen(self, endpoint: Endpoint, old: Endpoint | None) -> None:
        """Close the earlier plugin's channel, and read a plugin's lists until its stream ends."""
        if old is not None:
            old.channel.close()
        try:
            for text in endpoint.stream:
                with self._reads:
                    self._take_in(endpoint, text)
            ended = "OK"
        except (grpc.RpcError, ValueError) as error:  # ValueError if its channel was closed
            ended = error.code().name if isinstance(error, grpc.RpcError) else "CLOSED"
        with self._changed:
            endpoint.connected, endpoint.ended = False, ended
            self._changed.notify_all()
        endpoint.channel.close()

    def _take_in(self, endpoint: Endpoint, text: bytes) -> None:
        devices = {}
        for each in wire.messages(text, 1):
            nodes = [wire.messages(topology, 1) for topology in wire.messages(each, 3)]
            numa = tuple(wire.integer(node, 1) for some in nodes for node in some)
            name = wire.string(each, 1)
            devices[name] = Device(name, wire.string(each, 2) == "Healthy", numa)
        with self._changed:
            endpoint.devices = devices
            endpoint.lists += 1
            self.messages += 1
            self._changed.notify_all()

    def break_stream(self, resource: str) -> None:
        """Break one plugin's stream; its endpoint stays, with nothing allocatable."""
        with self._changed:
            endpoint = self._endpoints[resource]
        endpoint.stream.cancel()
        with self._changed:
            assert self._changed.wait_for(lambda: not endpoint.connected, PATIENCE_S)

    @contextlib.contextmanager
    def reading_nothing(self) -> Iterator[None]:
        """Read no list during the block, like a busy kubelet."""
        with self._reads:
            yield

    def endpoint(self, resource: str) -> Endpoint:
        """Return the plugin that registered a resource last."""
        with self._changed:
            return self._endpoints[resource]

    # What the node has ----------------------------------------------------------------------

    def resources(self) -> list[str]:
        """Return the names of the resources that were registered since the start."""
        with self._changed:
            return sorted(self._endpoints)

    def devices(self, resource: str) -> dict[str, Device]:
        """Return a resource's devices by id, all of them unhealthy where the stream has ended."""
        with self._changed:
            endpoint = self._endpoints.get(resource)
            if endpoint is None:
                return {}
            alive = endpoint.connected
            return {
                name: Device(name, each.healthy and alive, each.numa)
                for name, each in endpoint.devices.items()
            }

    def capacity(self, resource: str) -> int:
        """Return how many devices the node has, including unhealthy ones."""
        return len(self.devices(resource))

    def allocatable(self, resource: str) -> int:
        """Return how many healthy devices the node has, including those in use."""
        return sum(each.healthy for each in self.devices(resource).values())

    def wait_until(self, condition: Any, what: str, seconds: float = PATIENCE_S) -> None:
        """Wait until ``condition()`` holds, and check it at each change; fail after a while."""
        with self._changed:
            end = time.monotonic() + seconds
            while not condition():
                # Not every change of a condition sends a notification, so it is checked again, too.
                self._changed.wait(0.05)
                assert time.monotonic() < end, f"{what}: not within {seconds} s"

    def wait_for(
        self,
        resource: str,
        healthy: int | None = None,
        capacity: int | None = None,
        seconds: float = PATIENCE_S,
    ) -> None:
        """Wait until a resource is registered and has that many (healthy) devices."""

        def met() -> bool:
            endpoint = self._endpoints.get(resource)
            return (
                endpoint is not None
                and endpoint.connected
                and endpoint.lists > 0
                and healthy in (None, self.allocatable(resource))
                and capacity in (None, self.capacity(resource))
            )

        self.wait_until(met, f"{resource} with {healthy} of {capacity} healthy", seconds)

    # Pods ----------------------------------------------------------------------------------

    def admit(self, pod: str, requests: dict[str, int]) -> Answers:
        """Allocate devices for a pod of one container, and return its start parameters.

        A pod that already has devices gets the same answer from the checkpoint, if the devices
        still exist and are healthy. AdmissionError if the kubelet wouldn't admit the pod.
        """
        if pod in self._pods:
            self._check_again(self._pods[pod])
            return self._pods[pod]
        merged = Answers(ids={}, envs={}, mounts=[], devices=[], annotations={}, cdi_devices=[])
        for resource, count in requests.items():
            ids = self._choose(resource, count)
            try:
                text = self._ask(resource, "Allocate", ids, wire.message(*((1, i) for i in ids)))
            except grpc.RpcError as error:
                raise AdmissionError(f"Allocate failed due to {error.details()}") from None
            responses = wire.messages(text, 1)
            if not responses:
                raise AdmissionError("no containers in return allocation response")
            merged["ids"][resource] = ids
            _merge(merged, responses[0])
        self._pods[pod] = merged
        self._write_checkpoint()
        return merged

    def remove(self, pod: str) -> None:
        """Release a pod's devices."""
        del self._pods[pod]
        self._write_checkpoint()

    def free(self, resource: str) -> set[str]:
        """Return the ids of healthy devices that no pod has."""
        healthy = {name for name, each in self.devices(resource).items() if each.healthy}
        return healthy - self._used(resource)

    def preferred(self, resource: str, available: list[str], must: list[str], n: int) -> list[str]:
        """Return the ids that a plugin prefers to allocate."""
        words = [(1, each) for each in available] + [(2, each) for each in must]
        request = wire.message(*words, (3, n))
        text = self._ask(resource, "GetPreferredAllocation", available, request)
        return wire.strings(wire.messages(text, 1)[0], 1)

    def call(self, resource: str, method: str, request: bytes) -> bytes:
        """Call a plugin's method with a request written by hand; grpc.RpcError if it refuses."""
        with self._changed:
            endpoint = self._endpoints[resource]
        return endpoint.call(method, request)

    def _ask(self, resource: str, method: str, ids: list[str], container: bytes) -> bytes:
        self.calls.append((method, resource, ids))
        return self.call(resource, method, wire.message((1, container)))

    def _choose(self, resource: str, count: int) -> list[str]:
        with self._changed:
            endpoint = self._endpoints.get(resource)
        if endpoint is None:
            raise AdmissionError(f"cannot allocate unregistered device {resource}")
        if not self.allocatable(resource):
            raise AdmissionError("no healthy devices present; cannot allocate unhealthy devices")
        available = sorted(self.free(resource))
        if len(available) < count:
            raise AdmissionError(
                f"requested number of devices unavailable for {resource}. "
                f"Requested: {count}, Available: {len(available)}"
            )
        self.chance.shuffle(available)
        hint = []
        if endpoint.prefers:
            with contextlib.suppress(grpc.RpcError):  # on an error, the kubelet itself chooses
                hint = self.preferred(resource, available, [], count)
        preferred = [each for each in dict.fromkeys(hint) if each in available]
        chosen = list(dict.fromkeys([*preferred, *available]))[:count]
        self.chance.shuffle(chosen)
        return chosen

    def _used(self, resource: str) -> set[str]:
        return {each for pod in self._pods.values() for each in pod["ids"].get(resource, [])}

    def _check_again(self, answers: Answers) -> None:
        for resource, ids in answers["ids"].items():
            if resource not in self.resources():
                raise AdmissionError(f"cannot allocate unregistered device {resource}")
            devices = self.devices(resource)
            if not all(each in devices and devices[each].healthy for each in ids):
                raise AdmissionError("previously allocated devices are no longer healthy")

    def _write_checkpoint(self) -> None:
        text = base64.b64encode(json.dumps(self._pods).encode()).decode()
        (self.folder / CHECKPOINT).write_text(json.dumps({"pods": text}))

    def _read_checkpoint(self) -> None:
        try:
            text = json.loads((self.folder / CHECKPOINT).read_text())["pods"]
        except FileNotFoundError:
            return
        self._pods = json.loads(base64.b64decode(text))
        for pod in self._pods.values():
            pod["mounts"] = [Mount(*each) for each in pod["mounts"]]
            pod["devices"] = [Node(*each) for each in pod["devices"]]


def _merge(merged: Answers, text: bytes) -> None:
    """Add one resource's answer; values of earlier answers are kept."""
    for key, number in (("envs", 1), ("annotations", 4)):
        merged[key] = {**wire.mapping(text, number), **merged[key]}  # type: ignore[literal-required]
    for each in wire.messages(text, 2):
        mount = Mount(wire.string(each, 1), wire.string(each, 2), bool(wire.integer(each, 3)))
        if mount.container not in {other.container for other in merged["mounts"]}:
            merged["mounts"].append(mount)
    for each in wire.messages(text, 3):
        node = Node(*(wire.string(each, number) for number in (1, 2, 3)))
        if node.container not in {other.container for other in merged["devices"]}:
            merged["devices"].append(node)
    names = [wire.string(each, 1) for each in wire.messages(text, 5)]
    merged["cdi_devices"] = list(dict.fromkeys([*merged["cdi_devices"], *names]))


@contextlib.contextmanager
def relayed(*ends: socket.socket) -> Iterator[None]:
    """Relay data between two connections in both directions, during the block."""

    def hand_on(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(1 << 16):
                target.sendall(piece)

    pairs = (ends, ends[::-1])
    threads = [threading.Thread(target=hand_on, args=pair, daemon=True) for pair in pairs]
    for each in threads:
        each.start()
    try:
        yield
    finally:
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for each in threads:
            each.join()


@contextlib.contextmanager
def dead_socket(path: Path) -> Iterator[None]:
    """Make a socket without a listener during the block, as left by a killed process."""
    with socket.socket(socket.AF_UNIX) as new:
        new.bind(str(path))
    try:
        yield
    finally:
        path.unlink(missing_ok=True)

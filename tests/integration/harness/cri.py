"""The kubelet's side of the CRI: pods and containers of a containerd, asked for over gRPC.

Only the few messages and fields that the tests need are spelled out here, by number, as in
k8s.io/cri-api, pkg/apis/runtime/v1/api.proto.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import grpc
import ran
from wire import Value, fields, message

from harness.bundles import CGROUP_PARENT
from harness.commands import Result

NODE = 2  # NamespaceMode: the node's own network, so that no CNI plugin is needed
TIMEOUT_S = 60
SERVICE = "/runtime.v1.RuntimeService/"


class CriError(Exception):
    """What the engine answered instead of doing what it was asked to."""


@dataclass(frozen=True)
class Container:
    """A running container of a pod."""

    cri: "Cri"
    name: str

    def exec(self, *command: str) -> Result:
        """Run ``command`` in the container, as an exec probe does."""
        words = [(2, word) for word in command]
        answer = fields(self.cri.call("ExecSync", (1, self.name), *words, (3, TIMEOUT_S)))
        stdout, stderr = (answer.get(number, b"") for number in (1, 2))
        status = answer.get(3, 0)
        assert isinstance(stdout, bytes)
        assert isinstance(stderr, bytes)
        assert isinstance(status, int)
        return Result(command, status, stdout.decode(), stderr.decode())


class Cri:
    """A connection to an engine's CRI socket."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self._channel = grpc.insecure_channel(f"unix://{socket}")

    def call(self, method: str, *request: tuple[int, Value], timeout: float = TIMEOUT_S) -> bytes:
        """Call a method of the runtime service; CriError if the engine refuses."""
        call = self._channel.unary_unary(SERVICE + method)
        try:
            answer: bytes = call(message(*request), timeout=timeout, wait_for_ready=True)
        except grpc.RpcError as error:
            raise CriError(error.details()) from None
        ran.note_daemon(self._socket)
        return answer

    def is_ready(self) -> bool:
        """Tell whether the engine answers."""
        try:
            self.call("Version", (1, "v1"), timeout=1.0)
        except CriError:
            return False
        return True

    @contextmanager
    def pod(self, handler: str, title: str = "pod", group: str = "") -> Iterator["Pod"]:
        """Run a pod with a RuntimeClass' handler until the end of the block.

        ``group`` is its cgroup below the session's, such as /kubepods/podUID.
        """
        sandbox = _sandbox(title, CGROUP_PARENT + group)
        answer = fields(self.call("RunPodSandbox", (1, sandbox), (2, handler)))
        name = answer[1]
        assert isinstance(name, bytes)
        try:
            yield Pod(self, name.decode(), sandbox)
        except BaseException:
            with suppress(CriError):  # why the block ended says more
                self._end(name)
            raise
        self._end(name)

    def _end(self, name: bytes) -> None:
        self.call("StopPodSandbox", (1, name))
        self.call("RemovePodSandbox", (1, name))

    def close(self) -> None:
        """Hang up."""
        self._channel.close()


@dataclass(frozen=True)
class Pod:
    """A pod's sandbox, and the configuration that it was made from."""

    cri: Cri
    name: str
    sandbox: bytes

    def start(
        self,
        image: str,
        *command: str,
        env: Sequence[str] = (),
        devices: Sequence[str] = (),
        annotations: Mapping[str, str] | None = None,
        mounts: Iterable[tuple[str, str, bool]] = (),
        nodes: Iterable[tuple[str, str, str]] = (),
        attempt: int = 0,
    ) -> Container:
        """Create and start a container with NAME=value settings ``env``.

        ``devices`` are CDI names in the field for them, ``mounts`` and ``nodes`` are paths in the
        container and on the host with "read only" and permissions: as the kubelet gives a
        plugin's. ``attempt`` counts the containers of the pod, because one replaces another.
        """
        main = message((1, "main"), (2, attempt))
        config: list[tuple[int, Value]] = [(1, main), (2, message((1, image)))]
        config += [(3, word) for word in command]
        for setting in env:
            name, _, value = setting.partition("=")
            config.append((6, message((1, name), (2, value))))
        for place, source, read_only in mounts:
            config.append((7, message((1, place), (2, source), (3, int(read_only)))))
        for place, source, permissions in nodes:
            config.append((8, message((1, place), (2, source), (3, permissions))))
        for key, text in (annotations or {}).items():
            config.append((10, message((1, key), (2, text))))
        config += [(17, message((1, device))) for device in devices]
        security = message((3, message((1, NODE))), (1, message((1, "MKNOD"))))
        config.append((15, message((2, security))))
        wanted = (2, message(*config))
        answer = fields(self.cri.call("CreateContainer", (1, self.name), wanted, (3, self.sandbox)))
        container = answer[1]
        assert isinstance(container, bytes)
        self.cri.call("StartContainer", (1, container))
        return Container(self.cri, container.decode())


def _sandbox(title: str, group: str) -> bytes:
    """Return the configuration of a pod."""
    metadata = message((1, title), (2, f"uid-{title}"), (3, "default"))
    security = message((1, message((1, NODE))))
    return message((1, metadata), (8, message((1, group), (2, security))))

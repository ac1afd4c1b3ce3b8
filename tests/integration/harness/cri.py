"""The kubelet's side of the CRI: pods and containers of a containerd, asked for over gRPC.

Only the few messages and fields that the tests need are spelled out here, by number, as in
k8s.io/cri-api, pkg/apis/runtime/v1/api.proto.
"""

import re
import time
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
EXITED = 2  # ContainerState
TIMEOUT_S = 300
SERVICE = "/runtime.v1.RuntimeService/"
# containerd's CRI learns of an image that ctr has imported by an event, a moment later.
_MISSING_IMAGE = re.compile(r"failed to get sandbox image|failed to resolve image .*not found")
_IMPORT = 60.0  # seconds until then, at most


DROP_ALL = message((2, "ALL"))
RUNTIME_DEFAULT = b""  # SecurityProfile with profile_type RuntimeDefault, which is 0


@dataclass(frozen=True)
class Security:
    """Privileges of a pod and its containers.

    ``user`` is who runs, 0 for the image's own, root; ``restricted`` is as Pod Security's level of
    that name wants it; ``users`` are the host's (first, how many) of a user namespace of the pod's
    own, which has a network of its own then.
    """

    user: int = 0
    restricted: bool = False
    users: tuple[int, int] | None = None

    def namespaces(self) -> bytes:
        """Return the namespaces (NamespaceOption)."""
        if self.users is None:
            return message((1, NODE))
        first, length = self.users
        mapping = message((1, first), (2, 0), (3, length))
        return message((1, 0), (5, message((1, 0), (2, mapping), (3, mapping))))

    def of_container(self) -> bytes:
        """Return a container's (LinuxContainerSecurityContext)."""
        found: list[tuple[int, Value]] = [(3, self.namespaces())]
        if self.user:
            found.append((5, message((1, self.user))))
        if not self.restricted:
            return message(*found, (1, message((1, "MKNOD"))))
        return message(*found, (1, DROP_ALL), (11, 1), (15, RUNTIME_DEFAULT))

    def of_sandbox(self) -> bytes:
        """Return a pod's (LinuxSandboxSecurityContext)."""
        found: list[tuple[int, Value]] = [(1, self.namespaces())]
        if self.user:
            found.append((3, message((1, self.user))))
        return message(*found, *([(9, RUNTIME_DEFAULT)] if self.restricted else []))


USUAL = Security()


class CriError(Exception):
    """An error that the engine returned."""


@dataclass(frozen=True)
class Container:
    """A running container of a pod."""

    cri: "Cri"
    name: str

    def status(self) -> int | None:
        """Return the exit status, None while it runs."""
        answer = fields(self.cri.call("ContainerStatus", (1, self.name)))[1]
        assert isinstance(answer, bytes)
        found = fields(answer)
        if found.get(3) != EXITED:
            return None
        status = found.get(7, 0)
        assert isinstance(status, int)
        return status

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

    def call_with_image(self, method: str, *request: tuple[int, Value]) -> bytes:
        """Call a method that needs an image, which may just have been imported."""
        end = time.monotonic() + _IMPORT
        while True:
            try:
                return self.call(method, *request)
            except CriError as error:
                if not _MISSING_IMAGE.search(str(error)) or time.monotonic() >= end:
                    raise
            time.sleep(0.1)

    def is_ready(self) -> bool:
        """Tell whether the engine answers."""
        try:
            self.call("Version", (1, "v1"), timeout=1.0)
        except CriError:
            return False
        return True

    @contextmanager
    def pod(
        self,
        handler: str,
        title: str = "pod",
        group: str = "",
        security: Security = USUAL,
        annotations: Mapping[str, str] | None = None,
    ) -> Iterator["Pod"]:
        """Run a pod with a RuntimeClass' handler until the end of the block.

        ``group`` is its cgroup below the session's, such as /kubepods/podUID.
        """
        sandbox = _sandbox(title, CGROUP_PARENT + group, security, annotations or {})
        answer = fields(self.call_with_image("RunPodSandbox", (1, sandbox), (2, handler)))
        name = answer[1]
        assert isinstance(name, bytes)
        try:
            yield Pod(self, name.decode(), sandbox, security)
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
    security: Security = USUAL

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
        name: str = "main",
    ) -> Container:
        """Create and start a container with NAME=value settings ``env``.

        ``devices`` are CDI names in the field for them, ``mounts`` and ``nodes`` are paths in the
        container and on the host with "read only" and permissions: as the kubelet gives a
        plugin's. ``attempt`` counts the containers of the pod, because one replaces another.
        """
        main = message((1, name), (2, attempt))
        config: list[tuple[int, Value]] = [(1, main), (2, message((1, image)))]
        config += [(3, word) for word in command]
        for setting in env:
            key, _, value = setting.partition("=")
            config.append((6, message((1, key), (2, value))))
        for place, source, read_only in mounts:
            config.append((7, message((1, place), (2, source), (3, int(read_only)))))
        for place, source, permissions in nodes:
            config.append((8, message((1, place), (2, source), (3, permissions))))
        for key, text in (annotations or {}).items():
            config.append((10, message((1, key), (2, text))))
        config += [(17, message((1, device))) for device in devices]
        config.append((15, message((2, self.security.of_container()))))
        wanted = (2, message(*config))
        request = ((1, self.name), wanted, (3, self.sandbox))
        answer = fields(self.cri.call_with_image("CreateContainer", *request))
        container = answer[1]
        assert isinstance(container, bytes)
        self.cri.call("StartContainer", (1, container))
        return Container(self.cri, container.decode())


def _sandbox(title: str, group: str, security: Security, annotations: Mapping[str, str]) -> bytes:
    """Return the configuration of a pod."""
    metadata = message((1, title), (2, f"uid-{title}"), (3, "default"))
    notes = [(7, message((1, key), (2, text))) for key, text in annotations.items()]
    return message((1, metadata), *notes, (8, message((1, group), (2, security.of_sandbox()))))

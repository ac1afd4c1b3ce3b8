"""The kubelet's side of the CRI: pods and containers of a containerd, requested over gRPC.

Only the messages and fields that the tests need are encoded here, by number, as in
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
# containerd's CRI learns of a new image from an event, a moment after ctr has imported it.
_MISSING_IMAGE = re.compile(r"failed to get sandbox image|failed to resolve image .*not found")
_IMPORT = 60.0  # seconds until the CRI knows an imported image, at most


DROP_ALL = message((2, "ALL"))
RUNTIME_DEFAULT = b""  # SecurityProfile with profile_type RuntimeDefault, which is 0


@dataclass(frozen=True)
class Security:
    """Privileges of a pod and its containers.

    ``user`` is the user id, or 0 for the image's own user, root. ``restricted`` means the
    privileges that Pod Security's level of that name requires. ``users`` is the host's range
    (first, count) for the pod's own user namespace. A pod with this range also has a network
    of its own.
    """

    user: int = 0
    restricted: bool = False
    users: tuple[int, int] | None = None

    def namespaces(self) -> bytes:
        """Return the encoded namespaces (NamespaceOption)."""
        if self.users is None:
            return message((1, NODE))
        first, length = self.users
        mapping = message((1, first), (2, 0), (3, length))
        return message((1, 0), (5, message((1, 0), (2, mapping), (3, mapping))))

    def of_container(self) -> bytes:
        """Return a container's encoded privileges (LinuxContainerSecurityContext)."""
        found: list[tuple[int, Value]] = [(3, self.namespaces())]
        if self.user:
            found.append((5, message((1, self.user))))
        if not self.restricted:
            return message(*found, (1, message((1, "MKNOD"))))
        return message(*found, (1, DROP_ALL), (11, 1), (15, RUNTIME_DEFAULT))

    def of_sandbox(self) -> bytes:
        """Return a pod's encoded privileges (LinuxSandboxSecurityContext)."""
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
        """Return the exit status, or None while the container runs."""
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
        """Call a method of the runtime service; raise CriError if the engine refuses."""
        call = self._channel.unary_unary(SERVICE + method)
        try:
            answer: bytes = call(message(*request), timeout=timeout, wait_for_ready=True)
        except grpc.RpcError as error:
            raise CriError(error.details()) from None
        ran.note_daemon(self._socket)
        return answer

    def call_with_image(self, method: str, *request: tuple[int, Value]) -> bytes:
        """Call a method that needs an image; try again if the image was only just imported."""
        end = time.monotonic() + _IMPORT
        while True:
            try:
                return self.call(method, *request)
            except CriError as error:
                if not _MISSING_IMAGE.search(str(error)) or time.monotonic() >= end:
                    raise
            time.sleep(0.1)

    def is_ready(self) -> bool:
        """Return whether the engine responds."""
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
        """Run a pod with the handler of a RuntimeClass until the end of the block.

        ``group`` is its cgroup below the session's, such as /kubepods/podUID.
        """
        sandbox = _sandbox(title, CGROUP_PARENT + group, security, annotations or {})
        answer = fields(self.call_with_image("RunPodSandbox", (1, sandbox), (2, handler)))
        name = answer[1]
        assert isinstance(name, bytes)
        try:
            yield Pod(self, name.decode(), sandbox, security)
        except BaseException:
            with suppress(CriError):  # the block's own exception says more
                self._end(name)
            raise
        self._end(name)

    def _end(self, name: bytes) -> None:
        self.call("StopPodSandbox", (1, name))
        self.call("RemovePodSandbox", (1, name))

    def close(self) -> None:
        """Close the connection."""
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
        """Create and start a container with the NAME=value settings ``env``.

        ``devices`` are CDI names for the field CDI devices. ``mounts`` are paths in the
        container and on the host, with whether they are read-only. ``nodes`` are paths in the
        container and on the host, with permissions. The kubelet passes a plugin's mounts and
        nodes on in this way. ``attempt`` counts the containers of the pod, because one
        replaces another.
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

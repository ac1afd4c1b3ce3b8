"""Ask the kubelet which devices pods have (PodResources), in a child: gRPC has threads.

It is asked as a driver is, by ``telemetry.Telemetry``, and says

    {"ready": 1}
    {"answer": 7, "pods": [[namespace, pod, container, [[resource, id], ...]], ...]}
    {"error": text}         it can't be asked at all; the child ends

A CDI device of a claim (DRA) stands there as [its kind, its name].
"""

import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import quote

from gpuhook.ground.config.model import Config
from gpuhook.ground.container import kernel
from gpuhook.ground.errors import GpuhookError, PluginError
from gpuhook.tools.host.child import Talk, Work

SOCKET = "/var/lib/kubelet/pod-resources/kubelet.sock"
_DEADLINE = 0.5  # seconds that the child waits for the kubelet
_LIMIT = 16 << 20  # bytes of an answer, as many as the kubelet's own clients take


@dataclass(frozen=True)
class Place:
    """Where a kubelet is asked, with what ``Telemetry`` wants to know of an inventory."""

    root: str = SOCKET
    version: str = ""
    devices: tuple[Any, ...] = ()


class Used(NamedTuple):
    """The ids of all devices that containers have, and the namespaces of all pods.

    The kubelet says nothing of init containers that end, and before Kubernetes 1.34 nothing of
    claims' devices, so that a pod without any may have some.
    """

    ids: set[str]
    namespaces: set[str]


def can_ask(place: Place) -> bool:
    """Tell whether there is a kubelet that we may ask."""
    return os.access(place.root, os.R_OK | os.W_OK)


def begin(config: Config, place: Place, but: Collection[str]) -> Work:  # noqa: ARG001 - as every vendor's
    """Return what a child does that answers on ``place``."""
    return lambda talk: _answer_all(place.root, talk)


def _answer_all(path: str, talk: Talk) -> None:
    kernel.set_name("gpuhook-kubelet")
    try:
        import grpc  # noqa: PLC0415, F401 - in this process alone

        from gpuhook.tools.kubernetes import api  # noqa: PLC0415, F401
    except (ImportError, GpuhookError):
        why = "the kubelet can't be asked without the Python packages grpcio and protobuf"
        talk.say({"error": why})
        return
    talk.say({"ready": 1})
    for question in talk.asked():
        try:
            talk.say({"answer": question["ask"], "pods": pods(path, _DEADLINE)})
        except PluginError as error:
            talk.say({"answer": question["ask"], "failed": {path: error.cause}})


def pods(path: str, seconds: float) -> list[list[Any]]:
    """Return the pods with devices, as this module's first lines have them; raises as ``used``."""
    return [*_pods(_listed(path, seconds))]


def used(path: str, seconds: float) -> Used:
    """Return which devices pods have, and where there are pods.

    PluginError where the kubelet doesn't say within ``seconds``. Loads gRPC: for a process that
    forks no more.
    """
    found = _listed(path, seconds)
    ids = {name for *_, ids in _pods(found) for _, name in ids}
    return Used(ids, {pod.namespace for pod in found.pod_resources})


def _listed(path: str, seconds: float) -> Any:
    import grpc  # noqa: PLC0415 - as said

    from gpuhook.tools.kubernetes import api  # noqa: PLC0415

    options = (
        ("grpc.max_receive_message_length", _LIMIT),
        ("grpc.default_authority", "localhost"),
        ("grpc.enable_http_proxy", 0),
    )
    messages = api.pod_resources
    with grpc.insecure_channel(f"unix:{quote(path)}", options=options) as channel:
        call = channel.unary_unary(
            api.LIST_POD_RESOURCES,
            request_serializer=messages.ListPodResourcesRequest.SerializeToString,
            response_deserializer=messages.ListPodResourcesResponse.FromString,
        )
        try:
            return call(messages.ListPodResourcesRequest(), timeout=seconds)
        except grpc.RpcError as error:
            raise PluginError(
                f"the kubelet doesn't say which pods have devices: {error.details()}",
                f"See that it serves {path}",
            ) from None


def _pods(answer: Any) -> Iterator[list[Any]]:
    """Yield the containers that have a device of any kind."""
    for pod in answer.pod_resources:
        for container in pod.containers:
            ids = [
                [each.resource_name, name] for each in container.devices for name in each.device_ids
            ]
            for claim in container.dynamic_resources:
                for resource in claim.claim_resources:
                    names = (device.name for device in resource.cdi_devices)
                    ids += [
                        [kind, name] for kind, _, name in (each.partition("=") for each in names)
                    ]
            if ids:
                yield [pod.namespace, pod.name, container.name, ids]

"""A query of the kubelet for pods' devices (PodResources), in a child, because gRPC has threads.

``telemetry.TelemetryWorker`` runs the child as for a driver. It sends

    {"ready": 1}
    {"answer": 7, "pods": [[namespace, pod, container, [[resource, id], ...]], ...]}
    {"error": text}         the kubelet can't be queried at all; the child exits

A CDI device of a claim (DRA) is listed as [its kind, its name].
"""

import json
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import quote

from gpuhook.base.config.model import Config
from gpuhook.base.container import kernel
from gpuhook.base.errors import GpuhookError, PluginError
from gpuhook.base.host import files
from gpuhook.monitor.host.child import Channel, Work

SOCKET = "/var/lib/kubelet/pod-resources/kubelet.sock"
_DEADLINE = 0.5  # seconds that the child waits for the kubelet
_CHECKPOINT = "device-plugins/kubelet_internal_checkpoint"  # in the kubelet's folder
_MAX_BYTES = 16 << 20  # bytes of a response, as many as the kubelet's own clients accept


@dataclass(frozen=True)
class KubeletSocket:
    """A kubelet's socket, with the fields of an inventory that ``TelemetryWorker`` needs."""

    root: str = SOCKET
    version: str = ""
    devices: tuple[Any, ...] = ()


class DevicesInUse(NamedTuple):
    """The ids of all devices that containers have, and the namespaces of all pods.

    The kubelet doesn't report init containers that end, nor, before Kubernetes 1.34, devices of
    claims. So a pod without any reported devices may have some.
    """

    ids: set[str]
    namespaces: set[str]


def can_ask(place: KubeletSocket) -> bool:
    """Tell whether there is a kubelet that we may query."""
    return os.access(place.root, os.R_OK | os.W_OK)


def begin(config: Config, place: KubeletSocket, but: Collection[str]) -> Work:  # noqa: ARG001 - as every vendor's
    """Return the function of a child that answers questions about ``place``."""
    return lambda talk: _answer_all(place.root, talk)


def _answer_all(path: str, talk: Channel) -> None:
    kernel.set_name("gpuhook-kubelet")
    try:
        import grpc  # noqa: PLC0415, F401 - only in this process

        from gpuhook.monitor import kubelet_api as api  # noqa: PLC0415, F401
    except (ImportError, GpuhookError):
        why = "the kubelet can't be queried without the Python packages grpcio and protobuf"
        talk.say({"error": why})
        return
    talk.say({"ready": 1})
    for question in talk.asked():
        try:
            talk.say({"answer": question["ask"], "pods": pods(path, _DEADLINE)})
        except PluginError as error:
            talk.say({"answer": question["ask"], "failed": {path: error.cause}})


def pods(path: str, seconds: float) -> list[list[Any]]:
    """Return the pods with devices in this module's format; raises as ``used``."""
    return [*_pods(_listed(path, seconds))]


def used(path: str, seconds: float) -> DevicesInUse:
    """Return the devices of pods, and the namespaces with pods.

    PluginError if the kubelet doesn't answer within ``seconds``. Loads gRPC, so the process must
    not fork afterwards.
    """
    found = _listed(path, seconds)
    ids = {name for *_, ids in _pods(found) for _, name in ids}
    return DevicesInUse(ids, {pod.namespace for pod in found.pod_resources})


def checkpointed(path: str, uid: str, container: str) -> list[tuple[str, str]]:
    """Return a container's (resource, device id) pairs by the kubelet's own record of allocations.

    It has the init containers that end, which PodResources leaves out, and is written before such a
    container is created. ``path`` is the PodResources socket, ``uid`` the pod's. An absent record,
    or one of another form, has no devices. Source: pkg/kubelet/cm/devicemanager/checkpoint.
    """
    folder = os.path.dirname(os.path.dirname(path))
    try:
        data = json.loads(files.read(f"{folder}/{_CHECKPOINT}", _MAX_BYTES))["Data"]
        return [
            (str(entry["ResourceName"]), str(device))
            for entry in data["PodDeviceEntries"] or ()
            if uid and (entry["PodUID"], entry["ContainerName"]) == (uid, container)
            for devices in entry["DeviceIDs"].values()
            for device in devices
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, GpuhookError):
        return []


def _listed(path: str, seconds: float) -> Any:
    import grpc  # noqa: PLC0415 - as above

    from gpuhook.monitor import kubelet_api as api  # noqa: PLC0415

    options = (
        ("grpc.max_receive_message_length", _MAX_BYTES),
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
                f"the kubelet doesn't report the devices of pods: {error.details()}",
                f"Check that it serves {path}",
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

"""A liveness probe of this pod's plugin, by both sockets of each driver, as the kubelet calls it.

The calls are cheap: GetInfo, and a NodePrepareResources without claims.
"""

import os
from collections.abc import Iterator

from gpuhook.base.errors import PluginError, shown
from gpuhook.cluster.dra.options import short
from gpuhook.monitor import INSTALL

_INFO = "/pluginregistration.Registration/GetInfo"
_PREPARE = "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodePrepareResources"
_ENDPOINT = 3  # the field of PluginInfo that has the path of the other socket


def probe(registry: str, instance: str, seconds: float) -> list[str]:
    """Return this instance's sockets in the registration folder, after checking that all answer.

    [] if the node has no device, and so no driver. PluginError if a call isn't answered within
    ``seconds``.
    """
    if not instance:
        raise PluginError(
            "The probe doesn't know which instance to check", "Set POD_UID to the pod's uid"
        )
    own = f"-{short(instance)}-reg.sock"
    try:
        names = sorted(each for each in os.listdir(registry) if each.endswith(own))
    except OSError as error:
        raise PluginError(
            f"The folder of registrations {registry} can't be read: {error.strerror}",
            "Mount the kubelet's plugins_registry into the pod",
        ) from None
    for name in names:
        info = _asked(f"{registry}/{name}", _INFO, seconds)
        _asked(_endpoint(name, info), _PREPARE, seconds)
    return names


def _asked(path: str, method: str, seconds: float) -> bytes:
    """Return the response to an empty request."""
    try:
        import grpc  # noqa: PLC0415 - of an extra
    except ImportError:
        raise PluginError("The Python package grpcio isn't installed", INSTALL) from None
    with grpc.insecure_channel(f"unix://{path}") as channel:
        call = channel.unary_unary(method)
        try:
            answer: bytes = call(b"", timeout=seconds)
        except grpc.RpcError as error:
            why = error.code().name if isinstance(error, grpc.Call) else "an error"
            raise PluginError(
                f"{path} doesn't answer the kubelet's {method.rpartition('/')[2]}: {why}",
                "The pod is started again",
            ) from None
    return answer


def _endpoint(name: str, info: bytes) -> str:
    found = [value for field, value in _strings(info) if field == _ENDPOINT]
    if len(found) != 1 or not found[0].startswith("/"):
        raise PluginError(
            f"The plugin at {shown(name)} reports no endpoint", "The pod is started again"
        )
    return found[0]


def _strings(message: bytes) -> Iterator[tuple[int, str]]:
    """Yield field and text of a message of short strings; stop at anything else."""
    while len(message) >= 2 and message[0] & 7 == 2 and message[1] < 128:
        size = message[1]
        yield message[0] >> 3, message[2 : 2 + size].decode(errors="replace")
        message = message[2 + size :]

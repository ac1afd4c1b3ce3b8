"""One question to the kubelet, in a child: the ids of all devices that pods have."""

import time
from collections.abc import Set as AbstractSet

from gpuhook.base.config.model import Config
from gpuhook.monitor import kubelet
from gpuhook.monitor.telemetry import Telemetry

_PATIENCE = 5.0  # seconds for the start of the child, and for the kubelet's response


def ids_in_use(config: Config, socket: str) -> AbstractSet[str] | None:
    """Return the ids of all devices that pods have, None if the kubelet doesn't answer in time."""
    asking = Telemetry(kubelet, "Kubernetes", config, time.monotonic, _PATIENCE, "kubelet")
    try:
        answer = asking.ask(kubelet.Place(socket))
    finally:
        asking.let_go()
    if answer is None or "pods" not in answer:
        return None
    return {name for *_, ids in answer["pods"] for _, name in ids}

"""Running containers with the names of their pods, from the kubelet where no record has them."""

import time
from collections.abc import Iterable
from dataclasses import replace

from gpuhook.base.config.model import Config
from gpuhook.core.inventory.model import Inventory
from gpuhook.metrics import pods
from gpuhook.metrics.assigned import DeviceAssignments
from gpuhook.metrics.model import Container
from gpuhook.monitor import kubelet
from gpuhook.monitor.containers import device_users
from gpuhook.monitor.telemetry import TelemetryWorker
from gpuhook.vendors import registry

_PATIENCE = 4.0  # seconds for the start of the kubelet's query process, and for its response


def with_pods(
    containers: list[device_users.RunningContainer],
    inventories: Iterable[Inventory],
    config: Config,
    pod_resources: str,
) -> tuple[list[device_users.RunningContainer], str]:
    """Return the containers, with names from the kubelet if nothing else names them.

    ``pod_resources`` is its socket. Also returns a sentence if it doesn't answer, else "". Pods
    that share a device can't be distinguished, so they have no names here.
    """
    place = kubelet.KubeletSocket(pod_resources)
    inventories = list(inventories)
    if not kubelet.can_ask(place):
        return containers, ""
    given = DeviceAssignments(inventories)
    found = [_as_model(each, given) for each in containers]
    if not any(pods.may_be_a_pods(each) for each in found):
        return containers, ""
    asking = TelemetryWorker(kubelet, "Kubernetes", config, time.monotonic, _PATIENCE, "kubelet")
    try:
        answer = asking.ask(place)
    finally:
        asking.let_go()
    vendors = registry.all_vendors(config)
    of: list[tuple[str, Inventory, pods.Facts]]
    of = [(vendors[each.vendor].KIND, each, {}) for each in inventories]
    by_pod = pods.read((answer or {}).get("pods", ()), of)
    named = {each.id: each for each in pods.name(found, by_pod) if each.id}
    return [_named(each, named[each.name]) for each in containers], asking.problem


def _as_model(container: device_users.RunningContainer, given: DeviceAssignments) -> Container:
    return Container(
        id=container.name,
        engine=container.engine,
        pod=container.pod,
        namespace=container.namespace,
        container=container.container,
        devices=given.to(container),
    )


def _named(
    container: device_users.RunningContainer, found: Container
) -> device_users.RunningContainer:
    return replace(container, pod=found.pod, namespace=found.namespace, container=found.container)

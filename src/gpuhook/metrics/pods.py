"""Matching of pods to containers, by the devices that the kubelet gave them. Pure.

The kubelet doesn't report container ids, and gpuhook's records don't have every pod. A container
whose devices came without gpuhook's runtime was found by a scan, and has an id but no name.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from gpuhook.core.inventory.model import Device, Inventory
from gpuhook.metrics.containers import DeviceReference, assigned
from gpuhook.metrics.model import Container

Facts = Mapping[str, Mapping[str, Any]]  # by the ids of devices


@dataclass(frozen=True)
class Pod:
    """A container of a pod, and the ids of its devices."""

    namespace: str
    name: str
    container: str
    devices: frozenset[str]


def read(answer: Iterable[Any], found: Iterable[tuple[str, Inventory, Facts]]) -> list[Pod]:
    """Return the containers of a kubelet's response that have devices of this host.

    ``answer`` has the format of ``kubelet``; ``found`` are the vendors by their CDI kind, with
    facts about their devices in addition to the inventory.
    """
    found = list(found)
    pods = []
    for namespace, name, container, given in answer:
        devices = frozenset(
            device
            for resource, each in given
            for kind, inventory, facts in found
            if _is_of(resource, kind)
            for device in _devices(assigned(each), inventory, facts)
        )
        if devices:
            pods.append(Pod(namespace, name, container, devices))
    return pods


def name(containers: Iterable[Container], pods: Iterable[Pod]) -> list[Container]:
    """Return the containers, with names added to containers of pods that have none yet.

    A container that is the only one with its devices gets the name of the only pod with them. If
    several share devices, or none was found, the pods' containers are listed with only their names
    and devices, and the found containers with only their processes.
    """
    containers = list(containers)
    named = {(each.namespace, each.pod, each.container) for each in containers if each.pod}
    missing = [each for each in pods if (each.namespace, each.name, each.container) not in named]
    wanted = {
        pod.devices: [each for each in missing if each.devices == pod.devices] for pod in missing
    }
    found: list[Container] = []
    for devices, some in wanted.items():
        nameless = [
            each
            for each in containers
            if may_be_a_pods(each) and frozenset(each.devices) == devices
        ]
        if len(nameless) == len(some) == 1:
            found.append(_called(nameless[0], some[0]))
        else:
            given = tuple(sorted(devices))
            found += [_called(Container("", "kubernetes", devices=given), each) for each in some]
            found += [replace(each, devices=()) for each in nameless]
    changed = {each.id for each in found}
    return [*(each for each in containers if each.id not in changed), *found]


def may_be_a_pods(container: Container) -> bool:
    """Tell whether a container belongs to a pod and has no name yet."""
    is_pods = bool(container.pod_uid) or container.engine in ("kubernetes", "cri-o")
    return is_pods and not container.pod


def _called(container: Container, pod: Pod) -> Container:
    return replace(container, pod=pod.name, namespace=pod.namespace, container=pod.container)


def _is_of(resource: str, kind: str) -> bool:
    """Tell whether a resource is in a vendor's domain, or in a subdomain."""
    domain, ours = resource.partition("/")[0], kind.partition("/")[0]
    return domain == ours or domain.endswith(f".{ours}")


def _devices(what: DeviceReference, inventory: Inventory, facts: Facts) -> list[str]:
    """Return the device of an id as a list, empty if the id matches none or several."""
    found = [each.id for each in inventory.devices if _is_meant(each, what, inventory, facts)]
    return found if len(found) == 1 else []


def _is_meant(device: Device, what: DeviceReference, inventory: Inventory, facts: Facts) -> bool:
    if what.gi is not None:  # an instance of a GPU, which has a name or a minor
        whole = next((each for each in inventory.devices if each.id == device.parent), None)
        if whole is None or str(facts.get(device.id, {}).get("gpu_instance")) != what.gi:
            return False
        return whole.id == what.gpu or str(facts.get(whole.id, {}).get("minor")) == what.index
    if what.gpu:
        names = (text for texts in device.names.values() for text in texts if not text.isdecimal())
        return what.gpu in (device.id, *names) or f"/dev/{what.gpu}" in device.nodes
    return not device.parent and device.label == what.index

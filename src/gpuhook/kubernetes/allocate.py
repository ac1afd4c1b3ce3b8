"""What a container gets that was given devices: the answer to the kubelet's Allocate."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from gpuhook.errors import UnknownDeviceError, shown
from gpuhook.kubernetes.settings import Settings
from gpuhook.kubernetes.state import Node, Resource


@dataclass(frozen=True)
class Mount:
    """A mount: its path in the container, and on the host."""

    container: str
    host: str
    read_only: bool


@dataclass(frozen=True)
class Answer:
    """What the kubelet puts into a container."""

    envs: dict[str, str] = field(default_factory=dict)
    mounts: tuple[Mount, ...] = ()
    devices: tuple[Node, ...] = ()
    annotations: dict[str, str] = field(default_factory=dict)
    cdi_devices: tuple[str, ...] = ()


def allocate(resource: Resource, ids: Sequence[str], settings: Settings) -> Answer:
    """Return what a container gets with the kubelet's ``ids``; RequestError for an unknown one."""
    del settings
    offers = resource.offers()
    for each in ids:
        if each not in offers:
            raise UnknownDeviceError(
                f"{resource.name} has no device {shown(each)}",
                "The kubelet will know what there is from the next list",
            )
    selectors = dict.fromkeys(offers[each].selector for each in ids)
    return Answer({**resource.environment, resource.variable: ",".join(selectors)})

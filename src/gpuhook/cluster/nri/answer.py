"""The decision on a container's devices: as its variables request, and as a gate allows.

The steps are the same as at a start with gpu-py: privileges, variables, devices. The response has
the content of a CDI spec, because the image's files aren't known yet: nodes, files, variables, and
one hook that does the rest.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from gpuhook.base import log
from gpuhook.base.config.model import Config
from gpuhook.base.errors import RequestError, listed
from gpuhook.cluster.nri import asked as words
from gpuhook.cluster.nri.asked import PATIENCE, ContainerRequest
from gpuhook.cluster.nri.gate import Gate, spec_of, ungated
from gpuhook.cluster.vendors import cluster
from gpuhook.core import resource_limits
from gpuhook.core.cdi.generate import SpecSource, tidy
from gpuhook.core.contract import Grant
from gpuhook.core.inventory import cache
from gpuhook.core.inventory.model import Device
from gpuhook.core.request import memory_settings as sizes
from gpuhook.core.request.sources import parse_environment
from gpuhook.core.resolve import resolve
from gpuhook.core.verdict import Verdict
from gpuhook.monitor.vendors import survey
from gpuhook.vendors import registry

# (namespace, pod, container, the pod's uid, seconds left) -> the container's devices by the
# kubelet, as (resource or CDI kind, device id).
Given = Callable[[str, str, str, str, float], Iterable[tuple[str, str]]]
# Handlers whose runtime injects devices itself, and the one that obeys a verdict.
HANDLERS = ("gpu-py", "nvidia")
OBEYING = "gpu-py"
_MEBIBYTE = 20  # bits


@dataclass(frozen=True)
class InjectionMode:
    """The mode of injection: with a hook, or by CDI device names; ``given`` enables the gate."""

    config: Config
    hook: str
    by_cdi: bool = False
    given: Given | None = None


@dataclass(frozen=True)
class NriResponse:
    """The response for a container.

    ``edits`` are CDI edits, or a list "names" with ``by_cdi``; {} for none. ``verdict`` is what the
    runtime and the hook may inject in addition, None if none is written.
    """

    edits: dict[str, Any] = field(default_factory=dict)
    verdict: Verdict | None = None


def decide(asked: ContainerRequest, way: InjectionMode, end: float | None = None) -> NriResponse:
    """Return the response for a container; ``end`` is the deadline.

    RequestError or a DriverError, with a sentence, for a container that may not have the devices
    that it requests. MemoryLimitError for invalid annotations about memory.
    """
    limits = _memory_variables(asked, way.config)
    found = _decide(asked, way, end)
    if not limits:
        return found
    env = dict(each.partition("=")[::2] for each in found.edits.get("env", ()))
    entries = [f"{name}={value}" for name, value in {**env, **limits}.items()]
    return NriResponse({**found.edits, "env": entries}, found.verdict)


def _memory_variables(asked: ContainerRequest, config: Config) -> dict[str, str]:
    """Return the variables for the memory limits that the pod's annotations set.

    Runtimes and hooks read them, whatever gives the container its devices, where most engines
    don't pass annotations on. Of an annotation and a variable the lower limit counts.
    """
    found: dict[str, str] = {}
    env = parse_environment(asked.env)
    for names in registry.all_vendors(config).values():
        said = sizes.by_annotations(dict(asked.pod_annotations), names, (asked.name,))
        if not said:
            continue
        limit, request = names.MEMORY_VARIABLES
        if sum(each.partition("=")[0] == limit for each in asked.env) > 1:
            raise RequestError(  # engines set the first one, and runtimes read the last
                f"{asked} has {limit} more than once, and its pod an annotation for the same",
                f"Remove {limit} from the pod",
            )
        said += sizes.by_variables(env, names)
        size = min(each.number for word in said for _, each in word.entries) >> _MEBIBYTE
        found |= {limit: str(size)} | ({request: str(size)} if request in env else {})
    return found


def _decide(asked: ContainerRequest, way: InjectionMode, end: float | None) -> NriResponse:
    by_runtime = asked.handler in HANDLERS
    if by_runtime and way.given is None:  # protects: nri-gate-handlers
        return NriResponse()
    gate = _gate(asked, way, time.monotonic() + PATIENCE if end is None else end)
    about = words.about_devices(asked, way.config)
    if about:
        words.check_size(asked, about)
    if gate is not None:
        gate.check_understood()
    if not about:
        return NriResponse()
    if gate is None:
        return NriResponse(_own(asked, way, None)[0])
    gate.check_annotations()  # another plugin of the engine may read them
    obeyed = way.config.gate
    if obeyed and asked.handler == OBEYING:
        return NriResponse({}, gate.verdict(asked.env))
    found, vendors = ({}, []) if by_runtime else _own(asked, way, gate)
    ours = dict(each.partition("=")[::2] for each in found.get("env", ()))
    for names in vendors:  # protects: nri-gate-given
        ours.setdefault(next(iter(names.VARIABLES), ""), cluster.of(names).nothing)
    ours.pop("", None)
    changes = gate.changes(ours)
    env = gate.environment(changes)
    gate.check_readings(env)
    if changes:
        found["env"] = [f"{name}={value}" for name, value in changes.items()]
    given = [names.NAME for names in vendors]
    return NriResponse(found, gate.verdict(env, but=given) if obeyed else None)


def edits(asked: ContainerRequest, way: InjectionMode) -> dict[str, Any]:
    """Return only the edits, as ``decide`` does."""
    return decide(asked, way).edits


def _gate(asked: ContainerRequest, way: InjectionMode, end: float) -> Gate | None:
    """Return the gate, which queries the kubelet once, and waits for it until ``end``."""
    if way.given is None:
        return None
    given = way.given

    def names() -> Iterable[tuple[str, str]]:
        left = max(0.0, end - time.monotonic())  # protects: nri-gate-time
        return given(asked.namespace, asked.pod, asked.name, asked.pod_uid, left)

    return Gate(asked, way.config, names)


def _own(
    asked: ContainerRequest, way: InjectionMode, gate: Gate | None
) -> tuple[dict[str, Any], list[ModuleType]]:
    """Return our own edits, as for a container under runc, and the modules of their vendors."""
    config = ungated(way.config)
    spec = spec_of(asked, asked.env)
    resolved = resolve(spec, config, registry.all_vendors(config), any_is_all=gate is not None)
    if resolved is None:
        return {}, []
    if resolved.cdi_devices:
        raise RequestError(
            f"CDI devices of other vendors ({listed(resolved.cdi_devices)}) aren't injected here",
            "Request them by a claim or through their vendor's device plugin",
        )
    log.warn("gpuhook nri", resolved.misunderstood(), way.config)
    found: dict[str, Any] = {}
    for grant in resolved.grants:
        devices = tuple(grant.devices) if gate is None else gate.let_through(grant)
        for key, values in _edits(grant, devices, way).items():
            found.setdefault(key, []).extend(values)
    if way.config.raises_resource_limits and any(key in found for key in ("deviceNodes", "names")):
        found["rlimits"] = resource_limits.of_pod(dict(asked.rlimits), way.config)
    return found, [grant.vendor.names for grant in resolved.grants]


def _edits(
    grant: Grant, devices: tuple[Device, ...], way: InjectionMode
) -> Mapping[str, list[Any]]:
    names = grant.vendor.names
    if not devices:
        variable = next(iter(names.VARIABLES), "")
        return {"env": [f"{variable}={cluster.of(names).nothing}"]} if variable else {}
    if way.by_cdi:
        return {"names": [f"{names.KIND}={device.label}" for device in devices]}
    source = SpecSource(grant.vendor, grant.inventory, way.config, way.hook, way.config.path)
    document = {
        "cdiVersion": "0.7.0",
        "kind": names.KIND,
        "devices": [{"name": "asked", "containerEdits": source.edits(devices, whole=True)}],
        "containerEdits": source.common(),
    }
    made = tidy(document)
    found: dict[str, list[Any]] = {}
    for part in (made.get("containerEdits", {}), made["devices"][0].get("containerEdits", {})):
        for key, values in part.items():
            if isinstance(values, list):
                found.setdefault(key, []).extend(values)
    return found


def warm(config: Config) -> None:
    """Save the inventories before the first container, because a driver may take seconds."""
    survey.examine(config, lambda vendor: cache.get_inventory(config, vendor))

"""Decide what a container gets: what its variables ask for, with a gate no more than it was given.

The same steps decide as at a start by gpu-py: who may ask, by which variable, for which devices.
What is answered is what a CDI document of ours would have said, because the files of the image
aren't known yet: nodes, files, variables, and one hook that does the rest.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from gpuhook.ground import log
from gpuhook.ground.config.model import Config
from gpuhook.ground.errors import RequestError, listed
from gpuhook.start.cdi.generate import Source, tidy
from gpuhook.start.contract import Grant
from gpuhook.start.inventory import cache
from gpuhook.start.inventory.model import Device
from gpuhook.start.resolve import resolve
from gpuhook.start.verdict import Verdict
from gpuhook.tools.nri import asked as words
from gpuhook.tools.nri.asked import PATIENCE, Asked
from gpuhook.tools.nri.gate import Gate, spec_of, ungated
from gpuhook.tools.vendors import cluster, survey
from gpuhook.vendors import registry

# (namespace, pod, container, seconds that are left to say so) -> (resource or CDI kind, device id)
# that the kubelet gave it.
Given = Callable[[str, str, str, float], Iterable[tuple[str, str]]]
# Handlers whose runtime does this work, and the one that obeys a verdict.
HANDLERS = ("gpu-py", "nvidia")
OBEYING = "gpu-py"


@dataclass(frozen=True)
class Way:
    """How devices are given: by which hook, or by names of CDI devices; ``given`` is the gate."""

    config: Config
    hook: str
    by_cdi: bool = False
    given: Given | None = None


@dataclass(frozen=True)
class Answer:
    """What is done with a container.

    ``edits`` are CDI's, with ``by_cdi`` a list "names"; {} for none. ``verdict`` is what the
    runtime and the hook may give besides, None where there is none to write.
    """

    edits: dict[str, Any] = field(default_factory=dict)
    verdict: Verdict | None = None


def decide(asked: Asked, way: Way, end: float | None = None) -> Answer:
    """Return what a container gets; ``end`` is until when there has to be an answer.

    RequestError or a DriverError, with a sentence, for one that may not have what it asks for.
    """
    by_runtime = asked.handler in HANDLERS
    if by_runtime and way.given is None:  # protects: nri-gate-handlers
        return Answer()
    gate = _gate(asked, way, time.monotonic() + PATIENCE if end is None else end)
    about = words.about_devices(asked, way.config)
    if about:
        words.check_size(asked, about)
    if gate is not None:
        gate.check_understood()
    if not about:
        return Answer()
    if gate is None:
        return Answer(_own(asked, way, None)[0])
    gate.check_annotations()  # which another plugin of the engine's may read
    obeyed = way.config.gate
    if obeyed and asked.handler == OBEYING:
        return Answer({}, gate.verdict(asked.env))
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
    return Answer(found, gate.verdict(env, but=given) if obeyed else None)


def edits(asked: Asked, way: Way) -> dict[str, Any]:
    """Return only the edits, as ``decide`` does."""
    return decide(asked, way).edits


def _gate(asked: Asked, way: Way, end: float) -> Gate | None:
    """Return the gate, which asks the kubelet once and waits no longer than ``end``."""
    if way.given is None:
        return None
    given = way.given

    def names() -> Iterable[tuple[str, str]]:
        left = max(0.0, end - time.monotonic())  # protects: nri-gate-time
        return given(asked.namespace, asked.pod, asked.name, left)

    return Gate(asked, way.config, names)


def _own(asked: Asked, way: Way, gate: Gate | None) -> tuple[dict[str, Any], list[ModuleType]]:
    """Return what we give, as to a container under runc, and the names of vendors that it is of."""
    config = ungated(way.config)
    resolved = resolve(spec_of(asked, asked.env), config, registry.known(config))
    if resolved is None:
        return {}, []
    if resolved.cdi_devices:
        raise RequestError(
            f"CDI devices of other makers ({listed(resolved.cdi_devices)}) aren't given this way",
            "Ask for them by a claim or by the device plugin of their maker",
        )
    log.warn("gpuhook nri", resolved.misunderstood(), way.config)
    found: dict[str, Any] = {}
    for grant in resolved.grants:
        devices = tuple(grant.devices) if gate is None else gate.let_through(grant)
        for key, values in _edits(grant, devices, way).items():
            found.setdefault(key, []).extend(values)
    return found, [grant.vendor.names for grant in resolved.grants]


def _edits(grant: Grant, devices: tuple[Device, ...], way: Way) -> Mapping[str, list[Any]]:
    names = grant.vendor.names
    if not devices:
        variable = next(iter(names.VARIABLES), "")
        return {"env": [f"{variable}={cluster.of(names).nothing}"]} if variable else {}
    if way.by_cdi:
        return {"names": [f"{names.KIND}={device.label}" for device in devices]}
    source = Source(grant.vendor, grant.inventory, way.config, way.hook, way.config.path)
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
    """Have the inventories saved before the first container asks: a driver may take seconds."""
    survey.examine(config, lambda vendor: cache.get_inventory(config, vendor))

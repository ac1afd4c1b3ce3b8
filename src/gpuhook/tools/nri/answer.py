"""What a container gets: what its variables ask for, with a gate no more than the kubelet gave it.

The same steps decide as at a start by gpu-py: who may ask, by which variable, for which devices.
What is answered is what a CDI document of ours would have said, because the files of the image
aren't known yet: nodes, files, variables, and one hook that does the rest.
"""

import copy
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache as cached
from typing import Any

from gpuhook.ground import log
from gpuhook.ground.config.model import Config
from gpuhook.ground.errors import NoDriverError, RequestError, listed, printable
from gpuhook.start import contract
from gpuhook.start.cdi.generate import Source, tidy
from gpuhook.start.contract import Grant, Vendor
from gpuhook.start.inventory import cache
from gpuhook.start.inventory.model import Device, Inventory
from gpuhook.start.request import sources
from gpuhook.start.resolve import Resolved, resolve
from gpuhook.tools.vendors import cluster, survey
from gpuhook.vendors import registry

# (namespace, pod, container, seconds that are left to say so) -> (resource or CDI kind, device id)
# that the kubelet gave it.
Given = Callable[[str, str, str, float], Iterable[tuple[str, str]]]
# Handlers whose runtime does this work.
HANDLERS = ("gpu-py", "nvidia")
# An engine gives two seconds, and goes on without a plugin that takes longer. So the kubelet gets
# what is left of these, and what a container says is refused where it is long: 0.2 s is enough.
PATIENCE = 1.6  # seconds for an answer
_LONGEST = 1 << 16  # characters of all that asks for devices
_MOST = 20_000  # variables, mounts and annotations; of 2,000 services come 14,000 variables
_REMEDY = "Ask for it in the pod's resources: {}: 1"


@dataclass(frozen=True)
class Asked:
    """A container that is being created, as far as it says who it is and what it asks for.

    ``annotations`` are those that a runtime of ours may read.
    """

    namespace: str
    pod: str
    name: str
    handler: str
    env: tuple[str, ...]
    mounts: tuple[tuple[str, str], ...] = ()
    annotations: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Way:
    """How devices are given: by which hook, or by names of CDI devices; ``given`` is the gate."""

    config: Config
    hook: str
    by_cdi: bool = False
    given: Given | None = None


def edits(asked: Asked, way: Way) -> dict[str, Any]:
    """Return CDI's edits for the container, or with ``by_cdi`` a list "names"; {} for nothing.

    RequestError or a DriverError, with a sentence, for one that may not have what it asks for.
    """
    by_runtime = asked.handler in HANDLERS
    if by_runtime and way.given is None:  # protects: nri-gate-handlers
        return {}
    end = time.monotonic() + PATIENCE
    ours = _ours(asked, way.config)
    if not ours:
        return {}
    _check_size(asked, ours)
    if way.given is None:
        return _own(asked, way)
    way = replace(way, given=_once(way.given, end))
    found = {} if by_runtime else _own(asked, way)
    more = _limits(asked, way, found.get("env", ()))
    return {**found, "env": [*found.get("env", ()), *more]} if more else found


def _once(given: Given, end: float) -> Given:
    """Return what asks the kubelet once for each container, and waits no longer than ``end``."""

    def asking(namespace: str, pod: str, name: str) -> Iterable[tuple[str, str]]:
        left = max(0.0, end - time.monotonic())  # protects: nri-gate-time
        return given(namespace, pod, name, left)

    once = cached(asking)  # protects: nri-gate-once
    return lambda namespace, pod, name, _: once(namespace, pod, name)


def _ours(asked: Asked, config: Config) -> list[str]:
    """Return all that may ask for devices, and what begins as such a variable does."""
    known = registry.known(config).values()
    variables = [word for each in known for word in (*each.VARIABLES, *each.LEGACY)]
    words = [word.partition("_")[0] for word in variables] + [each.NAME.upper() for each in known]
    swarm = [variable for _, variable in sources.swarm_variables(config.swarm_resource)]
    starts = (*variables, *swarm, *{f"{word}_" for word in words})
    prefixes = config.cdi_annotation_prefixes
    return [
        *(each for each in asked.env if each.startswith(starts)),
        *(f"{to}{source}" for to, source in asked.mounts if sources.FOLDERS in to),
        *(f"{key}{text}" for key, text in asked.annotations if key.startswith(prefixes)),
    ]


def _check_size(asked: Asked, ours: Sequence[str]) -> None:
    """Refuse a container whose words take long to read: a refusal is an answer."""
    who = f"The container {printable(asked.name)}"
    length = sum(map(len, ours))
    if length > _LONGEST:  # protects: nri-longest
        raise RequestError(
            f"{who} asks for devices by variables, mounts and annotations of {length} characters "
            f"together, and they may have {_LONGEST}",
            "Shorten them; each of its variables that begins as a vendor's counts",
        )
    count = len(asked.env) + len(asked.mounts) + len(asked.annotations)
    if count > _MOST:  # protects: nri-most
        raise RequestError(
            f"{who} asks for devices and has {count} variables, mounts and annotations, and such "
            f"a container may have {_MOST}",
            "Give it fewer; enableServiceLinks: false spares those of a namespace's services",
        )


def _own(asked: Asked, way: Way) -> dict[str, Any]:
    """Return what we give, as to a container under runc: nobody else reads its variables."""
    resolved = _resolved(asked, way.config)
    if resolved is None:
        return {}
    if resolved.cdi_devices:
        raise RequestError(
            f"CDI devices of other makers ({listed(resolved.cdi_devices)}) aren't given this way",
            "Ask for them by a claim or by the device plugin of their maker",
        )
    log.warn("gpuhook nri", resolved.misunderstood(), way.config)
    found: dict[str, Any] = {}
    for grant in resolved.grants:
        devices = _let_through(grant, asked, way)
        for key, values in _edits(grant, devices, way).items():
            found.setdefault(key, []).extend(values)
    return found


def _resolved(
    asked: Asked,
    config: Config,
    env: Iterable[str] = (),
    annotations: Iterable[tuple[str, str]] = (),
) -> Resolved | None:
    """Return what a container asks for with these variables and annotations besides."""
    spec = {
        "process": {"env": [*asked.env, *env]},
        "mounts": [{"destination": to, "source": source} for to, source in asked.mounts],
        "annotations": dict(annotations),
    }
    return resolve(spec, config, registry.known(config))


# What a runtime of ours would give --------------------------------------------------------------


def _limits(asked: Asked, way: Way, env: Sequence[str]) -> list[str]:
    """Return the variables by which a runtime of ours gives no more than the gate lets through.

    ``env`` are those that it is given besides. Every container is judged, because gpu-py may be
    the default runtime, or have another name. RequestError where it would give more all the same.
    """
    more = []
    for grant in _by_runtime(asked, way, env):
        devices = _let_through(grant, asked, way)
        if len(devices) < len(grant.devices):
            names = grant.vendor.names
            labels = ",".join(device.label for device in devices) or cluster.of(names).nothing
            more.append(f"{next(iter(names.VARIABLES), '')}={labels}")
    for grant in _by_runtime(asked, way, [*env, *more]) if more else ():
        if len(_let_through(grant, asked, way)) < len(grant.devices):
            raise RequestError(
                f"The container {printable(asked.name)} asks for all devices in a way that no "
                "variable changes, and the kubelet hasn't given it all",
                f"Ask by a variable, such as {next(iter(grant.vendor.names.VARIABLES), '')}=all",
            )
    return more


def _by_runtime(asked: Asked, way: Way, env: Iterable[str]) -> list[Grant]:
    """Return what a runtime of ours would give a container with ``env`` besides.

    RequestError where documents or a vendor's options would bring what the kubelet hasn't given.
    """
    config = copy.copy(way.config)
    config.accept_envvar_unprivileged = True  # protects: nri-gate-privileges
    annotations = asked.annotations  # protects: nri-gate-annotations
    try:
        resolved = _resolved(asked, config, env, annotations)
    except NoDriverError:
        return []  # nor would the runtime give anything
    if resolved is None:
        return []
    _check_documents(resolved, asked, way)
    for grant in resolved.grants:
        _check_beside(grant, asked, way)
    return resolved.grants


def _check_beside(grant: Grant, asked: Asked, way: Way) -> None:
    """Raise RequestError where options bring what belongs to one tenant, as IMEX channels do."""
    wanted = cluster.of(grant.vendor.names).beside(grant.request.options)
    given = {f"{resource}={name}" for resource, name in _names(asked, way)} if wanted else ()
    others = [name for name in wanted if name not in given]
    if others:  # protects: nri-gate-beside
        remedy = "Remove the variable or mount that asks for it, or give it by a CDI name"
        raise _ungiven(asked, listed(others), remedy)


def _check_documents(resolved: Resolved, asked: Asked, way: Way) -> None:
    """Raise RequestError where a runtime would give CDI devices that the kubelet hasn't given."""
    if not resolved.cdi_devices:
        return
    given = [*_names(asked, way)]
    right = {f"{resource}={name.partition('::')[0]}" for resource, name in given}
    kinds = {name.partition("=")[0] for name in resolved.cdi_devices}
    for names in resolved.known.values():
        if names.KIND in kinds:
            vendor = contract.load(names)
            inventory = cache.get_inventory(way.config, vendor)
            ids = _devices(vendor, inventory, given)
            its = [device for device in inventory.devices if device.id in ids]
            right |= {f"{names.KIND}={name}" for each in its for name in (each.id, each.label)}
    others = [name for name in resolved.cdi_devices if name not in right]
    if others:  # protects: nri-gate-documents
        remedy = _REMEDY.format(others[0].partition("=")[0])
        raise _ungiven(asked, f"CDI device {listed(others)}", remedy)


# What the kubelet gave --------------------------------------------------------------------------


def _names(asked: Asked, way: Way) -> Iterable[tuple[str, str]]:
    """Return what the kubelet gave, where it is asked."""
    return way.given(asked.namespace, asked.pod, asked.name, PATIENCE) if way.given else ()


def _let_through(grant: Grant, asked: Asked, way: Way) -> tuple[Device, ...]:
    """Return the devices that the container may have; RequestError for one that isn't its own."""
    if way.given is None:
        return tuple(grant.devices)
    given = _devices(grant.vendor, grant.inventory, _names(asked, way))
    if "all" in grant.request.selectors:
        return tuple(device for device in grant.inventory.devices if device.id in given)
    others = [device.label for device in grant.devices if device.id not in given]
    if others:  # protects: nri-gate
        names = grant.vendor.names
        what = f"{names.NOUN} {listed(others)} by a variable"
        raise _ungiven(asked, what, _REMEDY.format(names.KIND))
    return tuple(grant.devices)


def _ungiven(asked: Asked, what: str, remedy: str) -> RequestError:
    return RequestError(
        f"The container {printable(asked.name)} of pod {printable(asked.namespace)}/"
        f"{printable(asked.pod)} asks for {what}, and the kubelet hasn't given it that",
        remedy,
    )


def _devices(vendor: Vendor, inventory: Inventory, names: Iterable[tuple[str, str]]) -> set[str]:
    """Return the ids of the devices that names of the kubelet mean, a share of one too."""
    answers = cluster.of(vendor.names)
    by_name: dict[str, str] = {}
    for device in inventory.devices:
        by_name[answers.id(device)] = by_name[device.id] = device.id
    words = {name.partition("::")[0]: resource for resource, name in names}
    found = {by_name[word] for word in words if word in by_name}
    kinds = [word for word, resource in words.items() if resource == vendor.names.KIND]
    labels = {device.label: device.id for device in inventory.devices}
    return found | {labels[word] for word in kinds if word in labels}


# Edits ------------------------------------------------------------------------------------------


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

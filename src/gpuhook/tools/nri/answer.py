"""What a container gets: what its variables ask for, with a gate no more than the kubelet gave it.

The same steps decide as at a start by gpu-py: who may ask, by which variable, for which devices.
What is answered is what a CDI document of ours would have said, because the files of the image
aren't known yet: nodes, files, variables, and one hook that does the rest.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache as cached
from typing import Any

from gpuhook.ground.config.model import Config
from gpuhook.ground.errors import RequestError, listed, printable
from gpuhook.start import contract
from gpuhook.start.cdi.generate import Source, tidy
from gpuhook.start.contract import Grant, Vendor
from gpuhook.start.inventory import cache
from gpuhook.start.inventory.model import Device, Inventory
from gpuhook.start.resolve import Resolved, resolve
from gpuhook.tools.vendors import cluster, survey
from gpuhook.vendors import registry

# (namespace, pod, container) -> (resource or CDI kind, device id) that the kubelet gave it.
Given = Callable[[str, str, str], Iterable[tuple[str, str]]]
# Handlers whose runtime does this work.
HANDLERS = ("gpu-py", "nvidia")


@dataclass(frozen=True)
class Asked:
    """A container that is being created, as far as it says who it is and what it asks for.

    ``annotations`` are those that its runtime reads.
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
    if way.given is not None:
        way = replace(way, given=cached(way.given))  # protects: nri-gate-once
    resolved = _resolved(asked, way)
    if resolved is None:
        return {}
    if by_runtime:
        return _edits_for_runtime(resolved, asked, way)
    if resolved.cdi_devices:
        raise RequestError(
            f"CDI devices of other makers ({listed(resolved.cdi_devices)}) aren't given this way",
            "Ask for them by a claim or by the device plugin of their maker",
        )
    found: dict[str, Any] = {}
    for grant in resolved.grants:
        devices = _let_through(grant, asked, way)
        for key, values in _edits(grant, devices, way).items():
            found.setdefault(key, []).extend(values)
    return found


def _resolved(asked: Asked, way: Way, *more: str) -> Resolved | None:
    """Return what a container asks for with ``more`` variables."""
    spec = {
        "process": {"env": [*asked.env, *more]},
        "mounts": [{"destination": to, "source": source} for to, source in asked.mounts],
        "annotations": dict(asked.annotations) if asked.handler in HANDLERS else {},
    }
    return resolve(spec, way.config, registry.known(way.config))


def _edits_for_runtime(resolved: Resolved, asked: Asked, way: Way) -> dict[str, Any]:
    """Return the variables by which a runtime of ours gives what the gate lets through.

    RequestError where it would give more all the same.
    """
    _check_documents(resolved, asked, way)
    env = []
    for grant in resolved.grants:
        devices = _let_through(grant, asked, way)
        if len(devices) < len(grant.devices):
            names = grant.vendor.names
            labels = ",".join(device.label for device in devices) or cluster.of(names).nothing
            env.append(f"{next(iter(names.VARIABLES), '')}={labels}")
    after = _resolved(asked, way, *env) if env else None
    for grant in after.grants if after is not None else ():
        if len(_let_through(grant, asked, way)) < len(grant.devices):
            raise RequestError(
                f"The container {printable(asked.name)} asks for all devices in a way that no "
                "variable changes, and the kubelet hasn't given it all",
                f"Ask by a variable, such as {next(iter(grant.vendor.names.VARIABLES), '')}=all",
            )
    return {"env": env} if env else {}


def _check_documents(resolved: Resolved, asked: Asked, way: Way) -> None:
    """Raise RequestError where a runtime would give CDI devices that the kubelet hasn't given."""
    if way.given is None or not resolved.cdi_devices:
        return
    given = [*way.given(asked.namespace, asked.pod, asked.name)]
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
        raise _ungiven(asked, f"CDI device {listed(others)}", others[0].partition("=")[0])


# What the kubelet gave --------------------------------------------------------------------------


def _let_through(grant: Grant, asked: Asked, way: Way) -> tuple[Device, ...]:
    """Return the devices that the container may have; RequestError for one that isn't its own."""
    if way.given is None:
        return tuple(grant.devices)
    names = way.given(asked.namespace, asked.pod, asked.name)
    given = _devices(grant.vendor, grant.inventory, names)
    if "all" in grant.request.selectors:
        return tuple(device for device in grant.inventory.devices if device.id in given)
    others = [device.label for device in grant.devices if device.id not in given]
    if others:  # protects: nri-gate
        names = grant.vendor.names
        raise _ungiven(asked, f"{names.NOUN} {listed(others)} by a variable", names.KIND)
    return tuple(grant.devices)


def _ungiven(asked: Asked, what: str, resource: str) -> RequestError:
    return RequestError(
        f"The container {printable(asked.name)} of pod {printable(asked.namespace)}/"
        f"{printable(asked.pod)} asks for {what}, and the kubelet hasn't given it that",
        f"Ask for it in the pod's resources: {resource}: 1",
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
        "devices": [{"name": "asked", "containerEdits": source.edits(devices)}],
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

"""Devices of a running container for `gpuhook explain`: its record, and its current state."""

import os
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from gpuhook.base import names
from gpuhook.base.config.loader import load
from gpuhook.base.config.model import Config
from gpuhook.base.errors import DriverError, GpuhookError, listed
from gpuhook.base.oci.spec import Spec, read_spec
from gpuhook.core.inventory.cache import get_inventory
from gpuhook.core.inventory.model import Inventory
from gpuhook.core.records import records
from gpuhook.monitor.containers import attached
from gpuhook.monitor.containers.device_users import RunningContainer
from gpuhook.monitor.vendors import survey
from gpuhook.tools.cli._containers import short, title
from gpuhook.tools.cli._explanation import Explanation, Row
from gpuhook.tools.running import repair
from gpuhook.tools.running.find import ContainerMatch, find

# Engines whose pods select a runtime with a RuntimeClass, and the engine that has the default.
_OF_PODS = ("kubernetes", "cri-o")
_DEFAULTS = {
    "docker": "docker", "podman": "podman", "kubernetes": "containerd", "cri-o": "crio",
}  # fmt: skip
_NAMED = 4
_PATHS = 8


def read_running(word: str, explanation: Explanation, config_path: str | None) -> Spec | None:
    """Add a running container's devices to an explanation; return the spec of its engine.

    Return None if no spec is found. Raise ContainerError for a word that matches no container.
    """
    config = load(config_path)
    inventories = _inventories(config)
    found = find(word, inventories, config.state_dir)
    holder = found.holder
    gone, lost = _lost(holder, inventories) if holder is not None and holder.record else ([], "")
    missing = [] if lost or holder is None or not holder.record else _missing(holder, inventories)
    explanation.container = _to_json(found, missing, gone)
    rows = explanation.circumstances
    rows.append(Row("Container", _who(found)))
    rows += _given(holder, inventories) if holder is not None else [Row("Was given", "nothing")]
    if lost:
        rows.append(Row("Lost", lost, "bad"))
    if missing:
        text = f"access to {listed(missing, _PATHS)}: gpuhook repair restores it"
        rows.append(Row("Lost", text, "bad"))
    spec = read_spec(f"{found.bundle}/config.json") if found.bundle else None
    strange = _is_strange(found)
    if strange:
        text = (
            f"{found.runtime}, not {names.RUNTIME}, so it was given nothing: {_advice(found, spec)}"
        )
        rows.append(Row("Started by", text, "poor"))
    if strange and spec is not None:
        text = f"it would get the devices below (request in {found.bundle}/config.json)"
        rows.append(Row(f"With {names.RUNTIME}", text))
    elif spec is None:
        rows.append(Row("Devices now", "unknown: its config.json wasn't found", "poor"))
    else:
        rows.append(Row("Devices now", f"those below (request in {found.bundle}/config.json)"))
    return spec


def _is_strange(found: ContainerMatch) -> bool:
    """Tell whether a container has no devices because another runtime than gpu-py started it."""
    if found.holder is not None or not found.runtime:
        return False
    program = os.path.realpath(found.runtime)
    return os.path.basename(program) != names.RUNTIME


def _advice(found: ContainerMatch, spec: Spec | None) -> str:
    """Return how to make its engine start such a container with gpu-py."""
    annotations = spec.data.get("annotations") if spec is not None else None
    written = annotations if isinstance(annotations, dict) else {}
    engine = records.engine_of(found.bundle, written) or found.engine
    if engine in _OF_PODS:
        how = f"add runtimeClassName: {names.RUNTIME} to its pod"
    elif engine == "containerd":
        how = f"add --runtime={names.RUNTIME} (nerdctl) or --runc-binary={names.RUNTIME} (ctr)"
    else:
        how = f"add --runtime={names.RUNTIME}"
    default = _DEFAULTS.get(engine)
    if default is None:
        return how
    install = f"gpuhook install --engine {default} --set-default"
    return f"{how}, or make that the default: {install}"


def _inventories(config: Config) -> list[Inventory]:
    """Return the host's inventories, none if its drivers fail: the record is enough then."""
    try:
        found, _ = survey.present(config, lambda vendor: get_inventory(config, vendor))
    except DriverError:
        found = []
    return found


def _who(found: ContainerMatch) -> str:
    holder = found.holder
    name = title(holder, found.name) if holder is not None else _plain(found)
    process = f", process {holder.pid} ({holder.command})" if holder is not None else ""
    image = str((holder.record or {}).get("image", "")) if holder is not None else ""
    return f"{name}, id {short(found.id)}{process}{f', image {image}' if image else ''}"


def _plain(found: ContainerMatch) -> str:
    name = found.name or short(found.id)
    return f"{found.engine}:{name}" if found.engine else name


def _given(holder: RunningContainer, inventories: Collection[Inventory]) -> Iterator[Row]:
    """Yield the devices of a container, from its record or its device nodes."""
    if holder.record is None:
        nodes = _paths(holder.nodes, inventories)
        text = f"{listed(nodes, _PATHS)}, seen from its nodes: gpuhook has no record of it"
        yield Row("Was given", text)
        return
    labels = {
        (each.vendor, device.id): device.label for each in inventories for device in each.devices
    }
    later = attached.ids_of(holder.record)
    for given in holder.record["given"]:
        vendor, request = given["vendor"], given["request"]
        devices: dict[bool, list[str]] = {True: [], False: []}
        for each in given["selected"]:
            label = labels.get((vendor, each), each)
            devices[(vendor, each) in later].append(f"{label} ({each})" if label != each else each)
        what = listed(devices[False], _NAMED) or "no device, only the driver"
        asked = listed(request["devices"], _NAMED) or "none"
        if request["source"] != attached.SOURCE:
            text = f"{what} of {given['kind']}: its {request['source']} said {asked}"
            yield Row("Was given", text)
        if devices[True]:
            yield Row("Attached", f"{listed(devices[True], _NAMED)} of {given['kind']}")
    if holder.cdi_devices:
        yield Row("Was given", f"{listed(holder.cdi_devices, _NAMED)}, from CDI specs")


def _paths(numbers: Iterable[tuple[int, int]], inventories: Iterable[Inventory]) -> list[str]:
    wanted = {*numbers}
    nodes = [node for each in inventories for node in each.nodes if node.numbers in wanted]
    return [node.path for node in nodes]


def _missing(holder: RunningContainer, inventories: Collection[Inventory]) -> list[str]:
    """Return the nodes that its cgroup no longer allows; none if that can't be determined."""
    try:
        return [node.path for node in repair.missing(holder, inventories)]
    except GpuhookError:
        return []


def _lost(holder: RunningContainer, inventories: Collection[Inventory]) -> tuple[list[str], str]:
    """Return its devices that the host no longer has, and a sentence."""
    gone = repair.moved(holder, inventories)
    if not gone:
        return [], ""
    return gone, f"{listed(gone, _NAMED)}: no longer on this host, or under another number"


def _to_json(found: ContainerMatch, missing: list[str], gone: list[str]) -> dict[str, Any]:
    holder = found.holder
    record = (holder.record if holder is not None else None) or {}
    return {
        "id": found.id,
        "engine": found.engine,
        "engine_name": found.name,
        "pid": holder.pid if holder is not None else None,
        "bundle": found.bundle or None,
        "runtime": found.runtime or None,
        "given": record.get("given", []),
        "attached": sorted(name for _, name in attached.ids_of(record)),
        "cdi_devices": holder.cdi_devices if holder is not None else [],
        "known_from": None if holder is None else "record" if record else "nodes",
        "missing_nodes": missing,
        "gone": gone,
    }

"""The CDI spec of one claim, with device names that are unique to the claim."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gpuhook.base import names as ours
from gpuhook.base.config.model import DEFAULT_PATH, Config
from gpuhook.base.errors import CdiError
from gpuhook.base.host import files as host_files
from gpuhook.cluster.device_plugin.documents import on_host
from gpuhook.cluster.dra.options import DraOptions
from gpuhook.core.cdi import versions
from gpuhook.core.cdi.names import file_stem
from gpuhook.core.contract import Vendor
from gpuhook.core.inventory.model import Device, Inventory
from gpuhook.monitor.host.driver_program import our_program

if TYPE_CHECKING:
    from gpuhook.core.cdi.generate import SpecSource

_CLASS = "claim"
_DOMAIN = "k8s."  # before the driver's name, as NVIDIA's driver has it: k8s.gpu.nvidia.com/claim
_FORMAT = "json"
_LONGEST = 255  # bytes of a file's name


@dataclass(frozen=True)
class ClaimDevice:
    """A device in a claim's CDI spec: its name there, its vendor, and additional edits.

    ``with_hook`` is whether gpuhook's hook has to run even if the device has only nodes.
    """

    name: str
    device: Device
    vendor: Vendor
    inventory: Inventory
    more: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    with_hook: bool = False


def kind(driver: str) -> str:
    """Return the kind of the CDI specs of a driver's claims."""
    return f"{_DOMAIN}{driver}/{_CLASS}"


def path(folder: str, driver: str, uid: str) -> str:
    """Return the path of a claim's CDI spec."""
    return f"{folder}/{file_stem(f'{_DOMAIN}{driver}', _CLASS, uid)}.{_FORMAT}"


def uids(folder: str, driver: str) -> list[str]:
    """Return the uids of all claims with a CDI spec of this driver in the folder."""
    name = re.escape(os.path.basename(path("", driver, "UID"))).replace("UID", "([A-Za-z0-9-]+)")
    pattern = re.compile(rf"{name}|\.{name}\.[0-9a-f]+")  # a temporary file of one, too
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return []
    return [match[1] or match[2] for match in map(pattern.fullmatch, names) if match]


def text(driver: str, given: Sequence[ClaimDevice], options: DraOptions, config: Config) -> str:
    """Return the text of a claim's CDI spec; a GpuhookError if that can't be made.

    A device that can't be used, or whose nodes are missing, is such an error.
    """
    from gpuhook.core.cdi.generate import SpecSource, tidy  # noqa: PLC0415 - only in a claim's child
    from gpuhook.tools.cdi import write as writing  # noqa: PLC0415

    devices: list[dict[str, Any]] = []
    common: dict[str, list[Any]] = {}
    remedy = "Reinstall gpuhook, so that its programs are in one folder"
    hook = options.cdi_hook_path or our_program(ours.CDI_HOOK, remedy)
    own = config.path and os.path.abspath(config.path)
    sources: dict[str, SpecSource] = {}
    for each in given:
        name = each.vendor.names.NAME
        if name not in sources:
            config_path = own if own != DEFAULT_PATH else None
            sources[name] = SpecSource(each.vendor, each.inventory, config, hook, config_path)
            _join(common, sources[name].common())
        _check(each, sources[name])
        edits: dict[str, list[Any]] = {}
        _join(edits, sources[name].edits([each.device]))
        _join(edits, each.more)
        if each.with_hook:  # protects: dra-limit-hook
            _join(edits, {"hooks": [sources[name].hook_entry()]})
        devices.append({"name": each.name, "containerEdits": edits})
    root = given[0].inventory.root
    document = {
        "cdiVersion": "", "kind": kind(driver), "devices": devices, "containerEdits": common,
    }  # fmt: skip
    document = on_host(tidy(document), options, root)
    document["cdiVersion"] = versions.needed(document)
    return writing.to_text(document, _FORMAT)


def write(where: str, made: str) -> None:
    """Write a claim's CDI spec atomically; CdiError if that fails."""
    from gpuhook.tools.cdi import write as writing  # noqa: PLC0415

    writing.write(where, made)


def remove(where: str) -> None:
    """Remove a claim's CDI spec if it exists; CdiError if that fails."""
    try:
        host_files.remove(where)
    except OSError as error:
        raise CdiError(
            f"{where} can't be removed: {error.strerror}",
            "Run this as root, with this folder writable",
        ) from None


def _check(given: ClaimDevice, source: "SpecSource") -> None:
    """Raise CdiError for an unusable device; a node may have been removed just now."""
    device, inventory = given.device, given.inventory
    whole = next((each for each in inventory.devices if each.id == device.parent), None)
    missing = {*inventory.missing()}
    absent = [path for path in (*device.nodes, *(whole.nodes if whole else ())) if path in missing]
    why = device.state or (f"there is no device node {absent[0]}" if absent else "")
    if why:
        raise CdiError(
            f"{given.vendor.names.NOUN} {device.label} can't be allocated: {why}",
            "The claim can be allocated another device when its pod is deleted",
        )
    given.vendor.check(source.grant([device]))


def _join(target: dict[str, list[Any]], edits: Mapping[str, Sequence[Any]]) -> None:
    for key, values in edits.items():
        target[key] = [*target.get(key, ()), *values]

"""Opaque configurations of a claim, which set options of its devices.

There are the vendors' own (``vendor_parts.claim_config``) and gpuhook's:

    apiVersion: gpuhook.io/v1
    kind: DeviceConfig
    memory: 8Gi          # or 50%

If several apply to a device, the claim's override the class's, and later ones earlier ones;
NVIDIA's and gpuhook's are merged separately. Unknown settings are refused, never ignored.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from gpuhook.base.errors import RequestError, listed, shown
from gpuhook.base.sizes import Size, parse_quantity, parse_size
from gpuhook.cluster import vendor_parts

API, KIND = "gpuhook.io/v1", "DeviceConfig"
_FIELDS = ("apiVersion", "kind", "memory")
_SOURCES = ("FromClass", "FromClaim")  # the later overrides the earlier


@dataclass(frozen=True)
class DeviceConfig:
    """The configuration of one device: its memory limit, and its vendor's own settings."""

    memory: Size | None = None
    plan: Mapping[str, Any] = field(default_factory=dict)


def wish(
    configs: Iterable[Mapping[str, Any]],
    driver: str,
    request: str,
    names: ModuleType,
    *,
    is_part: bool,
) -> DeviceConfig:
    """Return the configuration in an allocation's ``configs`` for a device of one request.

    ``request`` has the form of a result, with its subrequest. RequestError for an invalid one.
    """
    memory: Size | None = None
    plan: Mapping[str, Any] = {}
    ordered = sorted(configs, key=_rank)  # a stable sort keeps later ones later
    for each in ordered:
        opaque = each.get("opaque") or {}
        if opaque.get("driver") != driver or not _concerns(each.get("requests") or (), request):
            continue
        parameters = opaque.get("parameters")
        if not isinstance(parameters, Mapping):
            raise RequestError("A claim's configuration has no parameters", "Add parameters to it")
        if parameters.get("apiVersion") == API:
            memory = _ours(parameters)
            continue
        module = vendor_parts.claim_config(names)
        if module is None or parameters.get("apiVersion") not in module.APIS:
            known = [API, *(module.APIS if module else ())]
            raise RequestError(
                f"gpuhook knows no configuration of {shown(str(parameters.get('apiVersion')))} for "
                f"{names.TITLE}'s devices",
                f"Use one of {', '.join(known)}",
            )
        found = module.read(parameters, is_part=is_part)
        if found is not None:
            plan = found
        elif each.get("requests"):
            raise RequestError(
                f"The configuration {parameters.get('kind')} is for the request {request}, which "
                "got another kind of device",
                "Correct the claim's configuration",
            )
    return DeviceConfig(memory, plan)


def _rank(config: Mapping[str, Any]) -> int:
    source = config.get("source")
    return _SOURCES.index(source) if source in _SOURCES else 0


def _concerns(requests: Iterable[str], request: str) -> bool:
    """Tell whether a configuration applies to a request.

    No requests mean all. The name of a request includes its subrequests.
    """
    named = [*requests]
    return not named or request in named or request.partition("/")[0] in named


def _ours(parameters: Mapping[str, Any]) -> Size | None:
    unknown = [shown(str(each)) for each in parameters if each not in _FIELDS]
    if parameters.get("kind") != KIND or unknown:
        what = listed(unknown) or f"kind {shown(str(parameters.get('kind')))}"
        raise RequestError(
            f"gpuhook knows no {what} in a configuration of {API}",
            f"Use kind {KIND} with only memory",
        )
    text = parameters.get("memory")
    if text is None:  # null counts as missing
        return None
    number = parse_quantity(text)
    size = Size(str(text), number) if number is not None else parse_size(str(text))
    if size is None:
        raise RequestError(f"memory is {shown(str(text))}", "Write a quantity such as 8Gi, or 50%")
    return size

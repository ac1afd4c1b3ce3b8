"""Versions of resource.k8s.io that a cluster serves, and conversion of objects between them.

gpuhook uses v1 (Kubernetes 1.34). v1beta2 (1.33) has the same fields. v1beta1 (1.32) has a device's
fields below ``basic``, and a request's without ``exactly``.
"""

from typing import Any

from gpuhook.base.errors import PluginError
from gpuhook.cluster.dra.api_client import ApiClient, ApiError

Object = dict[str, Any]

GROUP = "resource.k8s.io"
KNOWN = ("v1", "v1beta2", "v1beta1")  # the best first
_PATIENCE = 10.0


def served(client: ApiClient, patience: float = _PATIENCE) -> str:
    """Return the best version that the cluster serves; PluginError for none that is known."""
    try:
        group = client.insist("GET", f"/apis/{GROUP}", patience)
    except ApiError as error:
        if error.status != 404:
            raise
        group = {}
    listed = group.get("versions")
    named = {each.get("version") for each in listed or [] if isinstance(each, dict)}
    found = next((each for each in KNOWN if each in named), "")
    if not found:
        raise PluginError(
            f"The cluster serves no version of {GROUP} that gpuhook knows ({', '.join(KNOWN)})",
            "Use Kubernetes 1.34 or newer, or enable DynamicResourceAllocation",
        )
    return found


def release(client: ApiClient, patience: float = _PATIENCE) -> tuple[int, int]:
    """Return the API server's version, (1, 35); PluginError if it reports none."""
    said = client.insist("GET", "/version", patience)
    try:
        # Some clouds write 35+ for a minor number.
        return int(str(said["major"])), int(str(said["minor"]).rstrip("+"))
    except (KeyError, ValueError):
        raise PluginError(
            "The API server doesn't report its version", "Check it with `kubectl version`"
        ) from None


def slice_in(version: str, given: Object) -> Object:
    """Return a v1 slice in the form of ``version``."""
    found = {**given, "apiVersion": f"{GROUP}/{version}"}
    devices = given["spec"].get("devices")
    if version == "v1beta1" and devices:
        basic = [
            {"name": each["name"], "basic": {key: each[key] for key in each if key != "name"}}
            for each in devices
        ]
        found["spec"] = {**given["spec"], "devices": basic}
    return found


def slice_of(given: Object) -> Object:
    """Return a slice of any version in the form of v1."""
    spec = given.get("spec")
    devices = spec.get("devices") if isinstance(spec, dict) else None
    if not isinstance(devices, list):
        return given
    plain = [
        {"name": each.get("name"), **each["basic"]} if isinstance(each.get("basic"), dict) else each
        for each in devices
        if isinstance(each, dict)
    ]
    return {**given, "spec": {**given["spec"], "devices": plain}}


def claim_of(given: Object) -> Object:
    """Return a claim of any version in the form of v1."""
    spec = given.get("spec")
    devices = spec.get("devices") if isinstance(spec, dict) else None
    requests = devices.get("requests") if isinstance(devices, dict) else None
    if not isinstance(requests, list):
        return given
    plain = [_request(each) for each in requests if isinstance(each, dict)]
    changed = {**given["spec"]["devices"], "requests": plain}
    return {**given, "spec": {**given["spec"], "devices": changed}}


def _request(given: Object) -> Object:
    if "exactly" in given or given.get("firstAvailable"):
        return {"name": given.get("name"), **given}
    rest = {key: given[key] for key in given if key not in ("name", "firstAvailable")}
    return {"name": given.get("name"), "exactly": rest}

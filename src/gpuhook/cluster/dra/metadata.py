"""Device metadata of a claim: files that tell a container's programs which devices they have.

There is one file for each request of a claim, which the claim's CDI spec mounts. It has the same
object once in each version of the format, newest first: readers skip versions that they don't know.

Source: the package k8s.io/dynamic-resource-allocation/api/metadata of Kubernetes 1.37 (KEP-5304).
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from gpuhook.base.errors import PluginError, RequestError, shown
from gpuhook.base.host import files
from gpuhook.cluster.dra.allocation_result import MOUNT_OPTIONS, AllocationResult, Ref
from gpuhook.cluster.dra.devices import DeviceRegistry

_API = "metadata.resource.k8s.io"
_VERSIONS = ("v1beta1", "v1alpha1")
_KIND = "DeviceMetadata"
_INSIDE = "/var/run/kubernetes.io/dra-device-attributes"
_BY_NAME, _BY_TEMPLATE = "resourceclaims", "resourceclaimtemplates"
# An annotation of claims that were made from a template: the claim's name in the pod.
POD_CLAIM = "resource.kubernetes.io/pod-claim-name"
_FOLDER = "device-metadata"  # in the driver's folder
_MODE = 0o644  # programs of any user read it
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
_FILE = re.compile(r"\.?([A-Za-z0-9-]+)_.*\.json.*")  # a temporary file of one, too
_LONGEST = 253  # characters of a name


def folder(plugins: str, driver: str) -> str:
    """Return the folder of a driver's metadata files."""
    return f"{plugins}/{driver}/{_FOLDER}"


def paths(where: str, uid: str, requests: Sequence[str]) -> list[str]:
    """Return the paths of a claim's files; ``requests`` have no subrequests."""
    return [f"{where}/{uid}_{request}.json" for request in dict.fromkeys(requests)]


def described(
    found: Sequence[AllocationResult],
    devices: DeviceRegistry,
    driver: str,
    ref: Ref,
    claim: Mapping[str, Any],
    where: str,
) -> tuple[list[AllocationResult], dict[str, str]]:
    """Return a claim's devices with the mounts of their metadata, and the files' texts by path.

    Each file is mounted with the first device of its request. RequestError for a name that can't
    be part of a path.
    """
    names = [str(each.get("request", "")) for each in _results(claim, driver)]
    pod_claim = ((claim.get("metadata") or {}).get("annotations") or {}).get(POD_CLAIM)
    for name in (ref["name"], *(each.held.request for each in found), pod_claim or "none"):
        _check(str(name))
    kind, name = (_BY_TEMPLATE, pod_claim) if pod_claim else (_BY_NAME, ref["name"])
    given: list[AllocationResult] = []
    made: dict[str, dict[str, Any]] = {}
    for each, request in zip(found, names, strict=True):
        [path] = paths(where, ref["uid"], [each.held.request])
        if path not in made:
            made[path] = _object(ref, pod_claim, request)
            inside = f"{_INSIDE}/{kind}/{name}/{each.held.request}/{driver}-metadata.json"
            mount = {"hostPath": path, "containerPath": inside, "options": [*MOUNT_OPTIONS]}
            more = {**each.given.more, "mounts": [*each.given.more.get("mounts", ()), mount]}
            given.append(replace(each, given=replace(each.given, more=more)))
        else:
            given.append(each)
        made[path]["requests"][0]["devices"].append(
            {
                "driver": driver,
                "pool": each.held.pool,
                "name": each.held.device,
                "attributes": devices.attributes(driver, each.held.device),
            }
        )
    return given, {path: _text(content) for path, content in made.items()}


def _results(claim: Mapping[str, Any], driver: str) -> list[Any]:
    allocation = (claim.get("status") or {}).get("allocation") or {}
    every = (allocation.get("devices") or {}).get("results") or []
    return [each for each in every if each.get("driver") == driver]


def _check(name: str) -> None:
    # An annotation's value is its author's, and the path leads into containers as root.
    if len(name) > _LONGEST or not _NAME.fullmatch(name):  # protects: dra-metadata-names
        raise RequestError(
            f"{shown(name)} can't be part of the path of device metadata",
            f"Use lower-case letters, digits, - and . in the claim's name, in its requests and in "
            f"its annotation {POD_CLAIM}",
        )


def _object(ref: Ref, pod_claim: str | None, request: str) -> dict[str, Any]:
    about = {key: ref[key] for key in ("name", "namespace", "uid")}
    template = {"podClaimName": pod_claim} if pod_claim else {}
    requests = [{"name": request, "devices": list[Any]()}]
    return {"metadata": {**about, "generation": 1}, **template, "requests": requests}


def _text(content: Mapping[str, Any]) -> str:
    every = [{"apiVersion": f"{_API}/{version}", "kind": _KIND, **content} for version in _VERSIONS]
    return "".join(json.dumps(each, indent=2) + "\n" for each in every)


def write(texts: Mapping[str, str]) -> None:
    """Write files atomically; PluginError if that fails."""
    for path, text in texts.items():
        try:
            os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
            files.replace(path, text.encode(), _MODE)
        except OSError as error:
            raise PluginError(
                f"{path} can't be written: {error.strerror}",
                "Run gpuhook dra as root, with this folder writable",
            ) from None


def uids(where: str) -> set[str]:
    """Return the uids of all claims that have files in a folder."""
    try:
        names = os.listdir(where)
    except OSError:
        return set()
    return {match[1] for match in map(_FILE.fullmatch, names) if match}


def remove(where: str, uid: str) -> None:
    """Remove a claim's files, temporary ones too, and an empty folder; PluginError on failure."""
    try:
        for name in os.listdir(where):
            if name.startswith((f"{uid}_", f".{uid}_")):
                os.unlink(f"{where}/{name}")
    except FileNotFoundError:
        return
    except OSError as error:
        raise PluginError(
            f"The device metadata in {where} can't be removed: {error.strerror}",
            "Run gpuhook dra as root, with this folder writable",
        ) from None
    with suppress(OSError):
        os.rmdir(where)

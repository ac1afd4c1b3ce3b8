"""Device metadata of claims: names that become parts of paths, and the content of the files."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from gpuhook.base.errors import RequestError
from gpuhook.cluster.dra import metadata
from gpuhook.cluster.dra.allocation_result import AllocationResult
from gpuhook.cluster.dra.document import ClaimDevice
from gpuhook.monitor.ledger.records import HeldDevice

DRIVER = "gpu.nvidia.com"
REF = {"namespace": "ns", "name": "train", "uid": "0-1"}
DEVICES: Any = SimpleNamespace(attributes=lambda _, name: {"uuid": {"string": name}})


def described(
    *devices: tuple[str, str], template: Any = None, name: str = "train"
) -> tuple[list[AllocationResult], dict[str, str]]:
    """Return the metadata for a claim with these requests and devices."""
    every = [{"driver": DRIVER, "request": request, "device": one} for request, one in devices]
    every.insert(1, {"driver": "another.example.com", "request": "gpu", "device": "x"})
    notes = {} if template is None else {metadata.POD_CLAIM: template}
    claim = {
        "metadata": {"annotations": notes},
        "status": {"allocation": {"devices": {"results": every}}},
    }
    device: Any = None
    found = [
        AllocationResult(
            HeldDevice(request.partition("/")[0], "n1", one),
            ClaimDevice(one, device, device, device, {"mounts": [{"containerPath": "/limit"}]}),
        )
        for request, one in devices
    ]
    ref = {**REF, "name": name}
    return metadata.described(found, DEVICES, DRIVER, ref, claim, "/plugins/metadata")


def test_each_request_has_a_file_with_its_devices() -> None:
    found, texts = described(("gpu", "a"), ("gpu", "b"), ("other/sub", "c"))
    assert {*texts} == {"/plugins/metadata/0-1_gpu.json", "/plugins/metadata/0-1_other.json"}
    mounts = [[each["containerPath"] for each in one.given.more["mounts"]] for one in found]
    start = "/var/run/kubernetes.io/dra-device-attributes/resourceclaims/train"
    assert mounts == [
        ["/limit", f"{start}/gpu/{DRIVER}-metadata.json"],
        ["/limit"],
        ["/limit", f"{start}/other/{DRIVER}-metadata.json"],
    ]
    newest, _ = json.JSONDecoder().raw_decode(texts["/plugins/metadata/0-1_gpu.json"])
    [request] = newest["requests"]
    assert [each["attributes"]["uuid"]["string"] for each in request["devices"]] == ["a", "b"]
    assert {each["driver"] for each in request["devices"]} == {DRIVER}


BAD = ["../../etc", "a/b", ".", "..", "", "A", "-a", "a-", "a\n", "x" * 300, "a\0", "\u00e4"]


@pytest.mark.protects(
    "dra-metadata-names",
    "a DRA claim's annotations can't redirect the path of its device metadata",
    instead="if not name:",
)
@pytest.mark.parametrize("name", [each for each in BAD if each])
def test_an_invalid_template_annotation_is_refused(name: str) -> None:
    with pytest.raises(RequestError, match="can't be part of the path of device metadata"):
        described(("gpu", "a"), template=name)


@pytest.mark.parametrize("name", BAD)
def test_invalid_request_names_are_refused(name: str) -> None:
    with pytest.raises(RequestError, match="can't be part of the path of device metadata"):
        described(("gpu", "a"), name=name)
    with pytest.raises(RequestError, match="can't be part of the path of device metadata"):
        described((name.partition("/")[0] if name == "a/b" else name, "a"), name=name)


def test_a_claim_template_names_the_metadata_folder() -> None:
    [found], texts = described(("gpu", "a"), template="mine")
    place = found.given.more["mounts"][-1]["containerPath"]
    assert "/resourceclaimtemplates/mine/gpu/" in place
    assert all('"podClaimName": "mine"' in text for text in texts.values())


def test_claim_uids_are_found_in_file_names() -> None:
    names = ["0-1_gpu.json", ".0-2_gpu.json.3f", "lock", "0-3.json"]
    found = [metadata._FILE.fullmatch(each) for each in names]
    assert [match and match[1] for match in found] == ["0-1", "0-2", None, None]

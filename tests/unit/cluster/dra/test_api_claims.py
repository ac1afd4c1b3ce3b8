"""Claims, read in every served API version, with a status in addition to other drivers'."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from api_server import HANG, ApiServer, serving
from timeouts import in_time

from gpuhook.base.errors import PluginError
from gpuhook.cluster.dra.access import Access
from gpuhook.cluster.dra.api_client import ApiClient, ApiError
from gpuhook.cluster.dra.claim_preparer import ClaimGoneError
from gpuhook.cluster.dra.cluster import ClusterClaims

ALLOCATION = {"devices": {"results": [{"request": "gpu", "driver": "gpu.nvidia.com"}]}}
DEVICE = {"driver": "gpu.nvidia.com", "pool": "n1", "device": "gpu-1"}


@pytest.fixture
def api(tmp_path: Path) -> Iterator[ApiServer]:
    with serving(tmp_path) as made:
        yield made


def cluster(
    api: ApiServer, node: str = "n1", patience: float = 15
) -> tuple[ClusterClaims, list[str]]:
    said: list[str] = []
    access = Access(api.url, f"{api.folder}/ca.crt", token=f"{api.folder}/token")
    return ClusterClaims(ApiClient(access), node, said.append, patience), said


def claim(api: ApiServer, requests: list[dict[str, Any]], name: str = "c1") -> str:
    spec = {"devices": {"requests": requests}}
    given = {"spec": spec, "status": {"allocation": ALLOCATION}}
    uid: str = api.add("resourceclaims", name, given, "default")["metadata"]["uid"]
    return uid


EXACTLY = {"name": "gpu", "exactly": {"deviceClassName": "gpu.nvidia.com", "count": 2}}
FIRST = {"name": "other", "firstAvailable": [{"name": "big", "deviceClassName": "a"}]}


def test_a_claim_is_read_with_one_request(api: ApiServer) -> None:
    uid = claim(api, [EXACTLY, FIRST])
    found = cluster(api)[0].claim("default", "c1", uid)
    assert found["spec"]["devices"]["requests"] == [EXACTLY, FIRST]
    assert found["status"]["allocation"] == ALLOCATION
    assert len(api.asked) == 1  # no request for API versions while the newest is served


@pytest.mark.parametrize("version", ["v1beta1", "v1beta2"])
def test_claims_of_older_api_versions_are_converted(api: ApiServer, version: str) -> None:
    api.versions = [version, "v1alpha3"]
    flat = {"name": "gpu", "deviceClassName": "gpu.nvidia.com", "count": 2}
    uid = claim(api, [flat if version == "v1beta1" else EXACTLY, FIRST])
    asking, _ = cluster(api)
    for _ in range(2):
        found = asking.claim("default", "c1", uid)
        assert found["spec"]["devices"]["requests"] == [EXACTLY, FIRST]
    assert api.count("GET", "/v1/") == api.count("GET", "k8s.io") - 3 == 1


def test_a_cluster_without_the_claims_api_is_an_error(api: ApiServer) -> None:
    api.versions = []
    with pytest.raises(PluginError, match="serves no version of"):
        cluster(api)[0].claim("default", "c1", "u")


@pytest.mark.protects("claim-uid", "DRA: a claim is used only if it has the requested uid")
def test_a_missing_or_replaced_claim_is_reported_as_gone(api: ApiServer) -> None:
    uid = claim(api, [EXACTLY])
    asking, _ = cluster(api)
    with pytest.raises(ClaimGoneError, match="There is no claim default/c2"):
        asking.claim("default", "c2", uid)
    with pytest.raises(ClaimGoneError, match="was replaced"):
        asking.claim("default", "c1", "uid-other")
    with pytest.raises(PluginError, match="can't be the name"):
        asking.claim("default", "../../nodes/n1", uid)


@pytest.mark.protects(
    "claim-not-found",
    "DRA: a claim is considered deleted only if Kubernetes answers NotFound",
    instead="if error.status != 404:",
)
def test_a_404_that_is_not_from_kubernetes_does_not_mean_a_claim_is_gone(api: ApiServer) -> None:
    """Only an API server with this API counts; after another 404 the devices stay allocated."""
    uid = claim(api, [EXACTLY])
    api.fail(404, word="resourceclaims")
    with pytest.raises(ApiError):
        cluster(api)[0].claim("default", "c1", uid)
    assert cluster(api)[0].claim("default", "c1", uid)


def test_a_claim_is_read_again_after_a_temporary_failure(api: ApiServer) -> None:
    uid = claim(api, [EXACTLY])
    api.fail(500)
    api.fail(429, retry_after="1")
    api.fail(HANG, times=0)
    assert cluster(api)[0].claim("default", "c1", uid)
    api.fail(HANG)
    with in_time(60), pytest.raises(ApiError, match="doesn't answer in time"):
        cluster(api, patience=0.5)[0].claim("default", "c1", uid)


def test_status_reports_of_two_nodes_do_not_affect_each_other(api: ApiServer) -> None:
    uid = claim(api, [EXACTLY])
    here, said = cluster(api)
    there, _ = cluster(api, "n2")
    here.report("default", "c1", uid, [DEVICE])
    there.report("default", "c1", uid, [{**DEVICE, "pool": "n2"}])
    assert here.claim("default", "c1", uid)["status"]["devices"] == [
        DEVICE,
        {**DEVICE, "pool": "n2"},
    ]
    here.report("default", "c1", uid, [])
    assert here.claim("default", "c1", uid)["status"]["devices"] == [{**DEVICE, "pool": "n2"}]
    assert said == []


def test_failed_status_reports_are_logged_once(api: ApiServer) -> None:
    uid = claim(api, [EXACTLY])
    asking, said = cluster(api)
    asking.report("default", "c2", uid, [DEVICE])  # c2 is gone, so this failure isn't logged
    asking.report("default", "c1", "another", [])
    assert said == []
    for _ in range(2):
        asking.report("default", "c1", "another", [DEVICE])
    assert len(said) == 1
    assert "precondition" in said[0]
    api.fail(403)
    asking.report("default", "c1", uid, [DEVICE])
    assert len(said) == 2


def test_a_cluster_that_drops_status_reports_is_logged_once(api: ApiServer) -> None:
    uid = claim(api, [EXACTLY])
    api.lacking = {"devices"}
    asking, said = cluster(api)
    for _ in range(2):
        asking.report("default", "c1", uid, [DEVICE])
    assert len(said) == 1
    assert "DRAResourceClaimDeviceStatus" in said[0]

"""The lease for engine restarts on nodes, taken from an API server of the tests."""

import importlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from api_server import ApiServer, serving

from gpuhook.base.errors import PluginError
from gpuhook.cluster.dra.access import Access
from gpuhook.cluster.dra.api_client import ApiClient

FOLDER = Path(__file__).parents[3] / "packaging/kubernetes/image"
NAME = "gpuhook/gpuhook-engine-restart"
FASTER = 200.0  # times as fast as a cluster's clock


@pytest.fixture(scope="module")
def module() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(FOLDER)
        yield importlib.import_module("node_lease")


@pytest.fixture
def api(tmp_path: Path) -> Iterator[ApiServer]:
    with serving(tmp_path / "api") as found:
        found.add("leases", "gpuhook-engine-restart", {}, "gpuhook")
        yield found


def client(api: ApiServer) -> ApiClient:
    return ApiClient(Access(api.url, f"{api.folder}/ca.crt", token=f"{api.folder}/token"))


def lease(module: ModuleType, api: ApiServer, holder: str) -> Any:
    return module.Lease(
        NAME,
        holder,
        client(api),
        lambda: time.monotonic() * FASTER,
        lambda seconds: time.sleep(seconds / FASTER),
    )


def spec(api: ApiServer) -> dict[str, Any]:
    found: dict[str, Any] = api.objects["leases", "gpuhook", "gpuhook-engine-restart"]["spec"]
    return found


@pytest.mark.protects(
    "one-engine-at-a-time",
    "Kubernetes: only one node at a time restarts its container engine",
    instead="if True:",
)
def test_only_one_node_holds_the_restart_lease_at_a_time(
    module: ModuleType, api: ApiServer
) -> None:
    inside, most, done = 0, 0, list[str]()
    counts = threading.Lock()

    def restart(node: str) -> None:
        nonlocal inside, most
        with lease(module, api, node).held() as renew:
            with counts:
                inside += 1
                most = max(most, inside)
            renew()
            time.sleep(0.02)
            with counts:
                inside -= 1
                done.append(node)

    nodes = [f"n{number}" for number in range(6)]
    with ThreadPoolExecutor(len(nodes)) as pool:
        [*pool.map(restart, nodes)]
    assert sorted(done) == nodes
    assert most == 1
    assert spec(api)["holderIdentity"] == ""
    assert spec(api)["leaseTransitions"] == len(nodes)


def test_a_vanished_node_loses_the_lease_only_after_its_duration(
    module: ModuleType, api: ApiServer
) -> None:
    """The duration counts from another node's first look, whatever the lease's time is."""
    gone = lease(module, api, "gone")
    manager = gone.held()
    manager.__enter__()
    api.objects["leases", "gpuhook", "gpuhook-engine-restart"]["spec"]["renewTime"] = "1999"
    began = time.monotonic()
    with lease(module, api, "next").held():
        assert (time.monotonic() - began) * FASTER > module.DURATION
        # A holder that comes back late doesn't take the lease from the new holder.
        manager.__exit__(None, None, None)
        assert spec(api)["holderIdentity"] == "next"


def test_a_holder_that_renews_the_lease_keeps_it(module: ModuleType, api: ApiServer) -> None:
    after = lease(module, api, "next").held()
    with lease(module, api, "slow").held() as renew:
        thread = threading.Thread(target=after.__enter__)
        thread.start()
        end = time.monotonic() + 2.0 * module.DURATION / FASTER
        while time.monotonic() < end:
            renew()
            time.sleep(0.01)
            assert spec(api)["holderIdentity"] == "slow"
    thread.join()
    assert spec(api)["holderIdentity"] == "next"


def test_the_release_waits_for_an_unavailable_api_server(
    module: ModuleType, api: ApiServer
) -> None:
    """The API server of k3s stops with its containerd, so the release has to wait for it."""
    with lease(module, api, "n1").held():
        api.fail(503, times=5)
    assert spec(api)["holderIdentity"] == ""


def test_a_restarted_installer_reuses_its_own_lease(module: ModuleType, api: ApiServer) -> None:
    ended = lease(module, api, "n1").held()
    ended.__enter__()
    began = time.monotonic()
    with lease(module, api, "n1").held():
        assert (time.monotonic() - began) * FASTER < module.DURATION


def test_missing_rights_to_the_lease_are_an_error(module: ModuleType, api: ApiServer) -> None:
    api.fail(403, times=9)
    with pytest.raises(PluginError, match="refuses GET"), lease(module, api, "n1").held():
        pass
    with pytest.raises(PluginError, match="this isn't a pod"):
        module.lease_of(NAME, "n1")
    assert module.lease_of("", "n1") is None

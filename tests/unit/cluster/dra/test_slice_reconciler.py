"""Restoration of a node's published slices after changes by the cluster and other clients."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import api_server
import pytest
from api_server import CUT, DRIP, GARBAGE, HANG, ApiServer, serving
from dra_node import DRIVER, Node, counted, counters, device, slices

A, B = device("a"), device("b")


@pytest.fixture
def api(tmp_path: Path) -> Iterator[ApiServer]:
    with serving(tmp_path) as made:
        made.add("nodes", "n1", {})
        made.add("nodes", "n2", {})
        yield made


@pytest.fixture
def node(api: ApiServer) -> Iterator[Node]:
    made = Node(api)
    yield made
    made.keeper.close()


@pytest.fixture
def settled(node: Node) -> Node:
    """A node that has published two slices and has no pending work."""
    node.want(slices([A], [B]))
    node.run(lambda: node.names() == ["a", "b"])
    node.rest(120)
    node.api.asked.clear()
    return node


def generation(node: Node) -> set[tuple[int, int]]:
    pools = [each["spec"]["pool"] for each in node.api.slices(node.name)]
    return {(each["generation"], each["resourceSliceCount"]) for each in pools}


def test_slices_are_published_with_the_node_as_owner(node: Node) -> None:
    node.want(slices([A], [B]))
    node.run(lambda: node.names() == ["a", "b"])
    found = node.api.slices("n1")
    uid = node.api.objects["nodes", "", "n1"]["metadata"]["uid"]
    owner = {"apiVersion": "v1", "kind": "Node", "name": "n1", "uid": uid, "controller": True}
    assert [each["metadata"]["ownerReferences"] for each in found] == [[owner]] * 2
    assert [
        each["metadata"]["name"].startswith(f"0000{n}-{DRIVER}-n1-") for n, each in enumerate(found)
    ]
    assert node.said == []


def test_an_unchanged_pool_causes_no_writes(settled: Node) -> None:
    """In two hours with the server's bookmarks the only requests are watches."""
    for _ in range(120):
        settled.api.bookmark()
        settled.rest(60)
    assert {(method, query.get("watch")) for method, _, query in settled.api.asked} <= {
        ("GET", "true")
    }
    assert len(settled.api.asked) <= 4
    settled.want(slices([A], [B]))
    settled.rest(120)
    assert settled.writes() == 0
    assert settled.said == []


def test_a_silent_watch_is_started_again(settled: Node) -> None:
    """After five minutes without data, the connection may be dead."""
    settled.rest(310)
    settled.run(lambda: settled.api.asked)
    [(_, _, query)] = settled.api.asked
    assert query["watch"] == "true"
    assert int(query["resourceVersion"]) > 100
    settled.api.wipe("n1")
    settled.run(lambda: settled.names() == ["a", "b"], 60)


def test_a_new_process_writes_nothing_for_an_unchanged_pool(settled: Node) -> None:
    other = Node(settled.api)
    other.want(slices([A], [B]))
    other.rest(100)
    assert other.writes() == 0
    assert other.api.count("GET", "slices") == 2
    other.keeper.close()


# Taints -------------------------------------------------------------------------------------------


def test_taints_are_added_at_once_and_removed_later(settled: Node) -> None:
    began = settled.now
    settled.want(slices([device("a", "xid=79")], [B]))
    settled.run(lambda: settled.taints() == [("a", f"{DRIVER}/xid")], 5)
    assert settled.now - began <= 5
    assert settled.writes() == 1
    assert generation(settled) == {(1, 2)}
    settled.want(slices([A], [B]))
    settled.rest(30)
    assert settled.writes() == 1  # removing a taint isn't urgent
    settled.run(lambda: settled.taints() == [], 60)
    assert settled.now - began <= 61
    assert settled.writes() == 2


def test_a_flapping_device_causes_few_writes(settled: Node) -> None:
    """A hundred changes in 100 s cause three writes, and the worse state counts at each moment."""
    for number in range(100):
        settled.want(slices([device("a", "" if number % 2 else "xid=79")], [B]))
        settled.rest(1)
        assert settled.taints() or number % 2
    settled.rest(60)
    assert settled.writes() <= 4
    assert settled.taints() == []


def test_a_failed_write_is_repeated_and_reported(settled: Node) -> None:
    settled.api.fail(403, "PUT", times=3)
    began = settled.now
    settled.want(slices([device("a", "xid=79")], [B]))
    settled.run(settled.taints, 60)
    assert 3 <= settled.now - began <= 8  # pauses: 0.5 to 1 s, 1 to 2 s, 2 to 4 s
    assert settled.api.count("PUT") == 4
    assert len(settled.said) == 2
    assert "may be outdated: The API server refuses PUT of" in settled.said[0]
    assert settled.said[1] == "The published slices are correct again"


def test_an_overloaded_server_is_asked_again_after_its_delay(settled: Node) -> None:
    settled.api.fail(429, "PUT", retry_after="40")
    began = settled.now
    settled.want(slices([device("a", "xid=79")], [B]))
    settled.run(settled.taints, 60)
    assert settled.now - began >= 40
    assert settled.api.count("PUT") == 2
    assert settled.api.count("GET") == 0  # the slices that it knows are still current


def test_taints_of_partitioned_gpus_are_added_and_removed(node: Node) -> None:
    """Health and partitions change together."""
    whole, part = counted("whole", "g0", 7), counted("part", "g0", 3)
    node.want(counters("g0"), slices([whole, part]))
    node.run(lambda: node.names() == ["whole", "part"])
    ill = [{**each, "taints": device("x", "xid=79")["taints"]} for each in (whole, part)]
    node.want(counters("g0"), slices(ill))
    node.run(lambda: len(node.taints()) == 2, 5)
    assert len(node.api.slices("n1")) == 2
    node.want(counters("g0"), slices([whole, part]))
    node.run(lambda: not node.taints(), 61)


# What others do -----------------------------------------------------------------------------------


@pytest.mark.protects(
    "slices-come-back", "DRA: resource slices that were deleted are published again"
)
def test_slices_deleted_by_the_kubelet_are_restored(settled: Node) -> None:
    assert settled.api.wipe("n1") == 2
    settled.run(lambda: settled.names() == ["a", "b"], 5)
    assert generation(settled) == {(2, 2)}
    assert settled.said == []


def test_a_slice_deleted_by_an_administrator_is_restored(settled: Node) -> None:
    settled.api.wipe(name=settled.api.slices("n1")[1]["metadata"]["name"])
    settled.run(lambda: settled.names() == ["a", "b"], 5)
    assert generation(settled) == {(1, 2)}


def test_a_slice_changed_by_another_client_is_restored(settled: Node) -> None:
    name = settled.api.slices("n1")[0]["metadata"]["name"]
    settled.api.change(name, lambda found: found["spec"]["devices"].clear())
    settled.run(lambda: settled.names() == ["a", "b"], 5)


@pytest.mark.protects(
    "no-race-for-slices",
    "DRA: slices that are deleted repeatedly are restored at growing intervals",
)
def test_repeatedly_deleted_slices_are_restored_at_growing_intervals(settled: Node) -> None:
    """Growing intervals avoid a race that loads the server."""
    settled.api.asked.clear()
    end = settled.now + 300
    while settled.now < end:
        settled.api.wipe("n1")
        settled.rest(1)
    assert 4 <= settled.writes() / 2 <= 15
    settled.rest(61)
    assert settled.names() == ["a", "b"]


def test_only_outdated_slices_of_this_driver_and_node_are_removed(
    api: ApiServer, node: Node
) -> None:
    other, old = slices([B], driver="gpu.other.com"), slices([B])
    elsewhere = slices([B])
    elsewhere[0]["spec"]["pool"]["name"] = "another-pool"
    for number, [each] in enumerate((other, old, elsewhere, slices([B], node="n2"))):
        api.add("resourceslices", f"{number:05x}-what-was", each)
    node.want(slices([A]))
    node.run(lambda: len(api.slices("n1")) == 2)
    node.rest(100)
    drivers = {each["spec"]["driver"]: each for each in api.slices("n1")}
    assert {*drivers} == {DRIVER, "gpu.other.com"}
    assert drivers[DRIVER]["spec"]["devices"][0]["name"] == "a"
    assert len(api.slices("n2")) == 1


@pytest.mark.protects(
    "slices-of-this-node",
    "DRA: a node leaves other nodes' resource slices unchanged",
    instead='is_its = spec.get("driver") in self._drivers',
)
def test_slices_of_other_nodes_are_unchanged(
    settled: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server may ignore the selector and send slices of other nodes."""
    api = settled.api
    monkeypatch.setattr(api_server, "_fits", lambda *_: True)
    [theirs] = slices([A], node="n2")
    name = api.add("resourceslices", "", theirs)["metadata"]["name"]
    api.cut_watches()
    settled.rest(100)
    with api.lock:
        api.floor = api.version  # the next watch is too old, so slices are listed again
    api.cut_watches()
    settled.rest(100)
    api.change(name, lambda found: found["metadata"].update(labels={"a": "b"}))
    settled.rest(100)
    assert settled.writes() == 0
    assert [each["metadata"]["name"] for each in api.slices("n2")] == [name]


def test_slices_of_a_removed_driver_are_deleted(settled: Node) -> None:
    settled.want(slices([A], driver="gpu.second.com"), drivers=(DRIVER,))
    settled.run(lambda: settled.names() == ["a"], 61)


def test_slices_of_a_recreated_node_are_restored_with_its_owner(settled: Node) -> None:
    """Kubernetes deletes the old node's slices; the new slices have the new node as their owner."""
    api = settled.api
    with api.lock:
        del api.objects["nodes", "", "n1"]
        uid = api.add("nodes", "n1", {})["metadata"]["uid"]
        api.wipe("n1")
    settled.run(lambda: settled.names() == ["a", "b"], 5)
    owners = [each["metadata"]["ownerReferences"][0]["uid"] for each in api.slices("n1")]
    assert owners == [uid, uid]


def test_slices_are_published_when_the_node_appears(api: ApiServer) -> None:
    node = Node(api, "n3")
    node.want(slices([A], node="n3"))
    node.rest(30)
    assert node.api.slices("n3") == []
    api.add("nodes", "n3", {})
    node.run(lambda: node.names() == ["a"], 61)
    assert "n3 not found" in node.said[0]
    node.keeper.close()


def test_a_write_conflict_keeps_the_other_clients_change(settled: Node) -> None:
    """Another client has written meanwhile, and the watch hasn't reported it yet."""
    name = settled.api.slices("n1")[0]["metadata"]["name"]
    settled.api.fail(409, "PUT")
    settled.api.change(name, lambda found: found["metadata"].update(labels={"theirs": "1"}))
    settled.want(slices([device("a", "xid=79")], [B]))
    settled.run(settled.taints, 10)
    assert settled.api.slices("n1")[0]["metadata"]["labels"] == {"theirs": "1"}


@pytest.mark.parametrize("what", [500, CUT])
def test_a_write_with_unknown_outcome_creates_no_duplicate_slices(settled: Node, what: Any) -> None:
    """The write may have succeeded, so existing slices are read before they are created again."""
    settled.api.fail(what, "POST")
    settled.api.wipe("n1")
    settled.run(lambda: settled.names() == ["a", "b"], 30)
    settled.rest(100)
    assert settled.names() == ["a", "b"]


# Watches ------------------------------------------------------------------------------------------


def _cut_and_forget(api: ApiServer) -> None:
    api.cut_watches()
    api.forget()


BROKEN: dict[str, Callable[[ApiServer], None]] = {
    "cut": lambda api: api.cut_watches(),
    "in the midst of a line": lambda api: api.cut_watches(b'{"type": "ADDED", "object": {"meta'),
    "not JSON": lambda api: api.cut_watches(b"<html>\n"),
    "gone": lambda api: api.forget(),
    "cut, and gone meanwhile": _cut_and_forget,
}  # fmt: skip


@pytest.mark.parametrize("name", [*BROKEN])
def test_a_broken_watch_is_restarted(settled: Node, name: str) -> None:
    BROKEN[name](settled.api)
    settled.api.wipe("n1")
    settled.run(lambda: settled.names() == ["a", "b"], 120)
    settled.rest(100)
    assert settled.names() == ["a", "b"]


def test_watches_that_end_constantly_are_restarted_rarely(settled: Node) -> None:
    """Behind a badly configured proxy the server gets about one request a minute at most."""
    settled.rest(60)
    settled.api.fail(GARBAGE, "GET", "watch=true", times=10_000)
    settled.api.cut_watches()
    for _ in range(60):
        settled.rest(60)
    assert settled.api.count("GET", "slices") <= 80


@pytest.mark.parametrize("what", [HANG, DRIP, GARBAGE, CUT, 500, 401])
def test_slices_are_written_after_failures_of_the_server(
    settled: Node, what: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settled.client, "ask", _impatient(settled.client.ask))
    settled.api.fail(what, times=3)
    settled.want(slices([device("a", "xid=79")], [B]))
    settled.run(settled.taints, 120)
    assert settled.said


def _impatient(ask: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *words, **more: ask(*words, **{**more, "patience": 0.5})


def test_an_expired_token_is_reported_until_it_is_renewed(settled: Node) -> None:
    settled.api.tokens = {"new"}
    settled.api.cut_watches()
    settled.rest(30)
    assert any("Unauthorized" in each for each in settled.said)
    settled.api.tokens.add("a.token-of.a-service-account")
    settled.api.wipe("n1")
    settled.run(lambda: settled.names() == ["a", "b"], 61)


# Clusters of other kinds --------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["v1beta1", "v1beta2"])
def test_older_api_versions_get_their_own_format(api: ApiServer, node: Node, version: str) -> None:
    api.versions = [version]
    api.release = ("1", "33+")
    node.want(slices([device("a", "xid=79")]))
    node.run(lambda: api.slices("n1"))
    [found] = api.slices("n1")
    [made] = found["spec"]["devices"]
    assert found["apiVersion"] == f"resource.k8s.io/{version}"
    assert ("basic" in made) == (version == "v1beta1")
    assert made.get("basic", made)["taints"][0]["key"] == f"{DRIVER}/xid"
    node.rest(300)
    assert node.writes() == 1
    assert node.said == []
    other = Node(api)
    other.want(slices([device("a", "xid=79")]))
    other.rest(300)
    assert other.writes() == 1
    other.keeper.close()


def test_counters_are_published_in_the_form_for_the_server_version(
    api: ApiServer, node: Node
) -> None:
    api.release = ("1", "34")
    node.keeper.want({"apart": slices([A], [B]), "together": slices([A])}, [])
    node.run(lambda: api.slices("n1"))
    node.rest(10)
    assert node.names() == ["a"]


@pytest.mark.protects(
    "dropped-fields", "DRA: slice fields that the cluster drops are compensated for"
)
@pytest.mark.parametrize("field", ["sharedCounters", "consumesCounters"])
def test_without_counters_in_the_cluster_no_device_is_given_twice(
    api: ApiServer, node: Node, field: str
) -> None:
    """A device and its parts aren't published together, even while this isn't known yet."""
    api.lacking = {field}
    whole, part = counted("whole", "g0", 7), counted("part", "g0", 3)
    node.want(counters("g0"), slices([whole, part]))
    node.run(lambda: node.names() == ["whole"])
    node.rest(300)
    assert node.names() == ["whole"]
    [sentence] = node.said
    assert "DRAPartitionableDevices is off" in sentence
    before = node.writes()
    node.rest(3000)
    assert node.writes() == before


@pytest.mark.protects(
    "dropped-fields", "DRA: slice fields that the cluster drops are compensated for"
)
def test_without_taints_in_the_cluster_unhealthy_devices_are_left_out(
    api: ApiServer, node: Node
) -> None:
    api.lacking = {"taints"}
    node.want(slices([A, B]))
    node.run(lambda: node.names() == ["a", "b"])
    node.want(slices([device("a", "xid=79"), B]))
    node.run(lambda: node.names() == ["b"], 5)
    [sentence] = node.said
    assert "DRADeviceTaints is off: unhealthy devices are left out instead" in sentence
    node.want(slices([A, B]))
    node.run(lambda: node.names() == ["a", "b"], 61)
    node.want(slices([A, device("b", "xid=79")]))
    node.run(lambda: node.names() == ["a"], 5)
    assert len(node.said) == 1


def test_a_feature_gate_switched_on_by_an_update_is_noticed(api: ApiServer, node: Node) -> None:
    api.lacking = {"taints"}
    node.want(slices([device("a", "xid=79"), B]))
    node.run(lambda: node.names() == ["b"])
    api.lacking, api.release = set(), ("1", "37")
    api.forget()  # the server was started again
    node.run(lambda: node.taints() != [], 120)


@pytest.mark.protects(
    "no-endless-writes", "DRA: a server that changes written objects doesn't cause endless writes"
)
def test_a_server_that_changes_objects_causes_no_endless_writes(
    api: ApiServer, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A webhook or newer server changes each object; gpuhook must not write it again forever."""
    accepted = api._accepted

    def changed(given: Any) -> Any:
        made = accepted(given)
        for each in made["spec"].get("devices", []):
            each["attributes"]["added"] = {"bool": True}
        return made

    monkeypatch.setattr(api, "_accepted", changed)
    node.want(slices([A], [B]))
    node.run(lambda: node.names() == ["a", "b"])
    for _ in range(10):
        api.bookmark()
        node.rest(300)
    assert node.writes() == 2
    api.wipe(name=api.slices("n1")[1]["metadata"]["name"])  # so the slices are compared again
    node.run(lambda: node.names() == ["a", "b"], 5)
    node.rest(300)
    assert node.writes() == 3
    assert generation(node) == {(1, 2)}


def test_a_taint_reaches_the_cluster_within_seconds(settled: Node) -> None:
    """The wall-clock time from the verdict to the cluster is far below 5 s."""
    began = time.monotonic()
    settled.want(slices([device("a", "xid=79")], [B]))
    settled.run(settled.taints)
    assert time.monotonic() - began < 5

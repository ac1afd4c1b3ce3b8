"""gpuhook dra with a kubelet: registration, prepared and unprepared claims, and faults."""

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import wire
from dra_kubelet import DEADLINE_S, Claim
from harness.commands import Process, wait_until
from harness.dra import GPU_DRIVER, Node, nodes_of, one_node, result, slice_name
from harness.driver import Driver, simulate
from harness.installation import Installation
from pod_resources import PodResources

from gpuhook.base.errors import PluginError
from gpuhook.cluster.dra.probe import probe
from gpuhook.cluster.dra.work import TIMEOUT

PREFIX = "k8s.gpu.nvidia.com/claim="
SHORT = 8  # seconds for a claim's work, instead of the time that a kubelet waits


@pytest.fixture
def driver(installation: Installation, tmp_path: Path) -> Driver:
    return simulate(installation, tmp_path / "root", "--gpus", "4")


@pytest.fixture
def node(installation: Installation, workspace: Path, driver: Driver) -> Iterator[Node]:
    with one_node(workspace, installation, driver.root) as made:
        yield made


def gpu(driver: Driver, number: int) -> str:
    return slice_name(driver.gpus[number].uuid)


def prepared(node: Node, claim: Claim) -> Any:
    found = node.kubelet.prepare(GPU_DRIVER, claim)[claim.uid]
    assert not isinstance(found, str), found
    return found


def refused(node: Node, claim: Claim) -> str:
    found = node.kubelet.prepare(GPU_DRIVER, claim)[claim.uid]
    assert isinstance(found, str), found
    return found


@pytest.mark.protects(
    "dra-document", "a DRA claim's CDI spec exists before the kubelet is answered", instead="pass"
)
def test_a_claim_is_prepared_and_unprepared(node: Node, driver: Driver) -> None:
    claim = node.claim("a", result(gpu(driver, 1)), result(gpu(driver, 2), "other/sub"))
    with node.service():
        plugin = node.kubelet.wait(GPU_DRIVER)
        assert plugin.versions == [
            "v1.DRAPlugin",
            "v1beta1.DRAPlugin",
            "v1.DRAResourceHealth",
            "v1alpha1.DRAResourceHealth",
        ]
        first, second = prepared(node, claim)
        assert (first.requests, first.pool, first.name) == (["gpu"], "n1", gpu(driver, 1))
        assert second.requests == ["other"]  # the request, without its subrequest
        assert first.cdi == [f"{PREFIX}{claim.uid}-{gpu(driver, 1)}"]
        document = node.document(claim)
        minors = [driver.gpus[number].minor for number in (1, 2)]
        assert nodes_of(document, first.cdi[0]) == {f"/dev/nvidia{minors[0]}"}
        assert nodes_of(document, second.cdi[0]) == {f"/dev/nvidia{minors[1]}"}
        before = [each.stat().st_mtime_ns for each in (*node.documents(), *node.written())]
        assert prepared(node, claim) == [first, second]
        after = [each.stat().st_mtime_ns for each in (*node.documents(), *node.written())]
        assert before == after
        assert node.kubelet.unprepare(GPU_DRIVER, claim) == {claim.uid: ""}
        assert node.left() == []
        assert node.kubelet.unprepare(GPU_DRIVER, claim) == {claim.uid: ""}
        stranger = Claim("ns", "never", "11111111-2222-3333-4444-555555555555")
        assert node.kubelet.unprepare(GPU_DRIVER, stranger) == {stranger.uid: ""}
    assert not [*node.kubelet.registry.iterdir()]


@pytest.mark.protects("dra-uid", "a DRA claim without the requested uid is refused")
@pytest.mark.protects("dra-names", "a DRA claim's uid from the kubelet is never used as a path")
@pytest.mark.protects("dra-pool", "DRA: an allocation from another pool gets no device")
def test_old_kubelets_are_served_and_broken_claims_refused(node: Node, driver: Driver) -> None:
    node.kubelet.knows = ("v1beta1.DRAPlugin",)
    good = node.claim("good", result(gpu(driver, 0)))
    gone = node.claim("gone", result(gpu(driver, 1)))
    node.forget(gone)
    other = node.claim("other", result(gpu(driver, 1)), trusting=True)
    other = other._replace(uid=str(other.uid[:-1]) + "f" * (other.uid[-1] != "f") or "e")
    none = node.claim("none")
    waiting = node.claim("waiting", status={})
    strange = node.claim("strange", result("gpu-that-never-was"))
    others = [
        node.claim(f"of-{number}", {**result(gpu(driver, 1)), "pool": pool})
        for number, pool in enumerate(("n2", "N1", "n1/second", "", None))
    ]
    with node.service():
        every = (good, gone, other, none, waiting, strange, *others)
        found = node.kubelet.prepare(GPU_DRIVER, *every)
        assert [each.name for each in found[good.uid]] == [gpu(driver, 0)]  # type: ignore[union-attr]
        assert found[none.uid] == []
        assert "isn't there" in found[gone.uid]
        assert "was replaced by another" in found[other.uid]
        assert "has no allocation" in found[waiting.uid]
        assert "isn't here" in found[strange.uid]
        for each in others:
            assert "and this node's is n1" in found[each.uid], each
        assert node.kubelet.prepare(GPU_DRIVER) == {}
        bad = Claim("ns", "x", "../../etc/passwd")
        assert "can't be the uid" in node.kubelet.prepare(GPU_DRIVER, bad)[bad.uid]
        assert "can't be the uid" in node.kubelet.unprepare(GPU_DRIVER, bad)[bad.uid]


@pytest.mark.protects(
    "dra-not-twice", "a device of one DRA claim isn't allocated to another claim", instead="pass"
)
def test_a_device_is_never_given_to_two_claims(node: Node, driver: Driver) -> None:
    first = node.claim("first", result(gpu(driver, 0)))
    second = node.claim("second", result(gpu(driver, 0)))
    admin = node.claim("admin", result(gpu(driver, 0), adminAccess=True))
    with node.service():
        prepared(node, first)
        assert "is claim ns/first's" in refused(node, second)
        assert prepared(node, admin)
        node.kubelet.unprepare(GPU_DRIVER, first)
        assert prepared(node, second)  # admin access doesn't hold the device
        assert "is claim ns/second's" in refused(node, first)


@pytest.mark.protects(
    "dra-lock",
    "only one of many simultaneous DRA claims gets a device",
    instead="held = contextlib.nullcontext()",
)
def test_only_one_of_many_simultaneous_claims_gets_a_device(node: Node, driver: Driver) -> None:
    with node.service():
        for attempt in range(3):
            name = result(gpu(driver, attempt))
            claims = [node.claim(f"c{number}", name) for number in range(12)]
            found = node.kubelet.prepare(GPU_DRIVER, *claims)
            assert sum(not isinstance(each, str) for each in found.values()) == 1
            assert len(node.documents()) == len(node.written()) == 1
            node.kubelet.unprepare(GPU_DRIVER, *claims)


def test_a_claim_survives_kill_restart_and_a_wiped_folder(node: Node, driver: Driver) -> None:
    claim = node.claim("a", result(gpu(driver, 0)))
    other = node.claim("b", result(gpu(driver, 0)))
    with node.service() as process:
        answer = prepared(node, claim)
        _kill(process)
    node.forget(claim)  # the service doesn't ask the API about a prepared claim
    with node.service():
        assert prepared(node, claim) == answer
        node.kubelet.wipe()
        node.kubelet.wait_until(lambda: not node.kubelet.instances(GPU_DRIVER), "it is gone")
        node.kubelet.wait(GPU_DRIVER)
        assert prepared(node, claim) == answer
        assert "is claim ns/a's" in refused(node, other)
        assert node.kubelet.unprepare(GPU_DRIVER, claim) == {claim.uid: ""}
        assert prepared(node, other)


def test_sigterm_removes_all_sockets(node: Node) -> None:
    """systemd stops a service by SIGTERM, and the kubelet must not find a dead socket."""
    with node.service() as process:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait()
        assert [*node.kubelet.registry.iterdir()] == []
        assert [*(node.kubelet.plugins / GPU_DRIVER).iterdir()] == []


def _kill(process: Process) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.mark.protects(
    "dra-boot",
    "devices of DRA claims from an earlier boot are free again",
    instead="is_old = record is None",
)
def test_records_of_an_earlier_boot_are_removed_and_damaged_ones_handled(
    node: Node, driver: Driver
) -> None:
    claim, other = (node.claim(name, result(gpu(driver, 0))) for name in ("a", "b"))
    with node.service():
        prepared(node, claim)
    record = node.written()[0]
    data = json.loads(record.read_text())
    record.write_text(json.dumps({**data, "boot": "another-boot"}))
    with node.service():
        wait_until(lambda: not node.left(), "what an earlier boot left is gone")
        assert prepared(node, other)
    record = node.written()[0]
    text = record.read_text()
    record.write_text(text[:50])
    with node.service():  # its containers may still run, so nothing is removed
        assert "can't be read, which records the owner of devices" in refused(node, claim)
        assert node.document(other)
        assert record.exists()
        assert prepared(node, other)  # the service repairs the record from the API server
        record.write_text(text[:50])
        assert node.kubelet.unprepare(GPU_DRIVER, other) == {other.uid: ""}
        assert node.left() == []
        assert prepared(node, claim)


@pytest.mark.protects(
    "dra-document", "a DRA claim's CDI spec exists before the kubelet is answered", instead="pass"
)
@pytest.mark.protects(
    "dra-completed",
    "a prepared DRA claim keeps its devices until it is unprepared",
    instead="self._undo(driver, uid); record = self._give(driver, ref, claim)",
)
def test_a_prepared_claim_keeps_its_device_until_unprepared(node: Node, driver: Driver) -> None:
    """Containers may have the device, even if the CDI spec is lost or a later request fails."""
    claim, other = (node.claim(name, result(gpu(driver, 0))) for name in ("a", "b"))
    with node.service():
        answer = prepared(node, claim)
        for results in ([], [result(gpu(driver, 1))], [result("gpu-gone")]):
            shutil.rmtree(node.cdi)  # a tmpfs was lost, or a user removed too much
            node.cdi.mkdir()
            node.claim("a", *results, uid=claim.uid)
            refused(node, claim)
            assert "is claim ns/a's" in refused(node, other)
        node.claim("a", result(gpu(driver, 0)), uid=claim.uid)
        assert prepared(node, claim) == answer
        assert node.document(claim)
    node.cdi.rename(node.folder / "old")  # as if engines and gpuhook now used another folder
    node.cdi.mkdir()
    with node.service():
        assert prepared(node, claim) == answer
        assert node.document(claim)


@pytest.mark.protects(
    "dra-same-claim",
    "a DRA claim with the uid of another claim doesn't get its devices",
    instead="pass",
)
def test_another_claim_with_the_same_uid_is_refused(node: Node, driver: Driver) -> None:
    claim = node.claim("a", result(gpu(driver, 0)))
    with node.service():
        prepared(node, claim)
        for stranger in (claim._replace(name="b"), claim._replace(namespace="other")):
            assert "has the uid of the claim ns/a" in refused(node, stranger)


@pytest.mark.protects(
    "dra-document", "a DRA claim's CDI spec exists before the kubelet is answered", instead="pass"
)
@pytest.mark.protects(
    "dra-in-order", "requests about the same DRA claim are processed in order", instead="if True:"
)
def test_a_claim_unprepared_while_it_is_prepared_leaves_nothing(node: Node, driver: Driver) -> None:
    """A restarted kubelet sends the unprepare request without waiting for the prepare request."""
    late = node.claim("late", result(gpu(driver, 0)), hang=4)
    with node.service():
        plugin = node.kubelet.wait(GPU_DRIVER)
        request = wire.message(
            (1, wire.message((1, late.namespace), (2, late.uid), (3, late.name)))
        )
        with pytest.raises(grpc.RpcError, match="DEADLINE_EXCEEDED"):
            plugin.call("NodePrepareResources", request, timeout=1)
        assert node.kubelet.unprepare(GPU_DRIVER, late) == {late.uid: ""}
        wait_until((node.claims / "ns_late.status").exists, "its work is done")
        assert node.left() == []


@pytest.mark.protects(
    "dra-device-twice",
    "a device listed twice in a DRA claim has two CDI device names",
    instead="return usual",
)
def test_a_device_twice_in_one_claim_gets_two_cdi_names_and_one_status(
    node: Node, driver: Driver
) -> None:
    """For example, a monitoring user's claim also has the device."""
    name = gpu(driver, 0)
    claim = node.claim("a", result(name), result(name, "look", adminAccess=True))
    with node.service():
        one, two = prepared(node, claim)
        assert one.cdi != two.cdi
        for each in (one, two):
            assert nodes_of(node.document(claim), each.cdi[0]) == {
                f"/dev/nvidia{driver.gpus[0].minor}"
            }
        status = node.claims / "ns_a.status"
        wait_until(status.exists, "the claim's status says so")
        assert len(json.loads(status.read_text())["devices"]) == 1


def test_two_instances_serve_claims_during_an_update(node: Node, driver: Driver) -> None:
    claim, other = (node.claim(name, result(gpu(driver, 0))) for name in ("a", "b"))
    with node.service(instance="uid-of-the-old-pod"):
        old = node.kubelet.wait(GPU_DRIVER)
        answer = node.kubelet.prepare(GPU_DRIVER, claim, plugin=old)
        with node.service(instance="uid-of-the-new-pod"):
            node.kubelet.wait(GPU_DRIVER, 2)
            new = next(each for each in node.kubelet.instances(GPU_DRIVER) if each is not old)
            assert node.kubelet.prepare(GPU_DRIVER, claim, plugin=new) == answer
            found = node.kubelet.prepare(GPU_DRIVER, other, plugin=new)
            assert "is claim ns/a's" in found[other.uid]
            assert node.kubelet.unprepare(GPU_DRIVER, claim, plugin=old) == {claim.uid: ""}
            assert node.kubelet.prepare(GPU_DRIVER, other, plugin=new)
            assert len({*node.kubelet.registry.iterdir()}) == 2


@pytest.mark.protects("dra-probe", "a DRA probe detects a supervisor that hangs")
def test_a_probe_detects_a_hung_supervisor(node: Node) -> None:
    """Without the probe only the server would reply, and each claim would time out."""
    with node.service(instance="pod") as process:
        plugin = node.kubelet.wait(GPU_DRIVER)
        assert len(probe(str(node.kubelet.registry), "pod", 20)) == 1
        os.kill(process.pid, signal.SIGSTOP)
        try:
            with pytest.raises(PluginError, match="NodePrepareResources: DEADLINE_EXCEEDED"):
                probe(str(node.kubelet.registry), "pod", 2)
        finally:
            os.kill(process.pid, signal.SIGCONT)
        assert plugin.call("NodePrepareResources", b"") == b""


@pytest.mark.protects(
    "dra-in-time",
    "abandoned requests for DRA claims don't delay other claims",
    instead="while False:",
)
def test_abandoned_claims_do_not_delay_other_claims(node: Node, driver: Driver) -> None:
    """The API server hangs for more claims than the service prepares at once."""
    hanging = [node.claim(f"h{number}", hang=100) for number in range(34)]
    good = node.claim("good", result(gpu(driver, 1)))
    with node.service(limit=SHORT):
        found = node.kubelet.prepare(GPU_DRIVER, *hanging, good)
        assert all(isinstance(found[each.uid], str) for each in hanging), found
        # Within one claim's time limit, the service works on two times sixteen claims at
        # most. Then it answers the others.
        assert sum("Work on other claims" in str(each) for each in found.values()) >= 3, found
        assert prepared(node, good)


@pytest.mark.protects(
    "dra-deadline",
    "a hanging request about a DRA claim is answered with an error after a timeout",
    instead="late = False",
)
def test_a_late_api_server_fails_only_one_claim(node: Node, driver: Driver) -> None:
    assert SHORT < TIMEOUT < DEADLINE_S
    late = node.claim("late", result(gpu(driver, 0)), hang=100)
    good = node.claim("good", result(gpu(driver, 1)))
    with node.service(limit=SHORT):
        found = node.kubelet.prepare(GPU_DRIVER, late, good)
        assert f"took longer than {SHORT} seconds" in found[late.uid]
        assert [each.name for each in found[good.uid]] == [gpu(driver, 1)]  # type: ignore[union-attr]
        assert node.kubelet.unprepare(GPU_DRIVER, late) == {late.uid: ""}


def _deleted(node: Node, claim: Claim) -> None:
    node.forget(claim)


def _made_again(node: Node, claim: Claim) -> None:
    node.claim(claim.name, result("another"))


def _released(node: Node, claim: Claim) -> None:
    node.claim(claim.name, uid=claim.uid, status={})


def _moved(node: Node, claim: Claim) -> None:
    node.claim(claim.name, result("another"), uid=claim.uid)


@pytest.mark.protects(
    "dra-gone-twice",
    "a deleted DRA claim's devices are released only if it's still gone a minute later",
    instead="is_late = True",
)
@pytest.mark.protects(
    "dra-gone-still", "a DRA claim that reappears is no longer recorded as deleted", instead="pass"
)
@pytest.mark.protects(
    "dra-gone-said",
    "a DRA claim isn't mistaken for deleted while the API server is unreachable",
    instead="return True",
)
@pytest.mark.protects(
    "dra-gone-unused",
    "devices of a deleted DRA claim are kept until the kubelet reports them unused",
    instead="unused = [*holders]",
)
@pytest.mark.parametrize("go", [_deleted, _made_again, _released, _moved])
def test_devices_of_a_gone_claim_are_freed_after_a_delay(
    go: Callable[[Node, Claim], None], node: Node, driver: Driver
) -> None:
    """A kubelet that lost its folder never unprepares the claim, so the service does it later."""
    pods = node.folder / "pods.sock"
    gone = node.claim("gone", result(gpu(driver, 0)))
    other = node.claim("other", result(gpu(driver, 0)))
    with node.service(options={"pod_resources": str(pods)}):
        [device] = prepared(node, gone)
        kind, _, name = device.cdi[0].partition("=")
        with PodResources(pods):
            _refuse(node, other, since=False)  # the cluster still has the claim
        go(node, gone)
        _refuse(node, other, since=False)  # the kubelet doesn't answer
        with PodResources(pods, ("ns", "pod", "main", kind, (name,))) as kubelet:
            _refuse(node, other, since=False)  # a pod still has the device
            kubelet.given.clear()
            _refuse(node, other, since=True)
            _refuse(node, other, since=True)  # it became known only now
            _grow_old(node, gone)
            kubelet.given.append(("ns", "pod", "main", kind, (name,)))
            _refuse(node, other, since=False)
            kubelet.given.clear()
            _refuse(node, other, since=True)
            _grow_old(node, gone)
            node.claim("gone", uid=gone.uid, away=True)  # the API server doesn't answer
            _refuse(node, other, since=False)
            go(node, gone)
            _refuse(node, other, since=True)
            _grow_old(node, gone)
            prepared(node, other)
        assert [path.name for path in node.written()] == [f"claim_{other.uid}_{GPU_DRIVER}.json"]
        assert len(node.documents()) == 1
        assert "Claim ns/gone was deleted from the cluster: unprepared" in node.log


@pytest.mark.protects(
    "dra-gone-unlisted",
    "devices of a deleted DRA claim are kept while its namespace still has pods",
    instead="is_listed = False",
)
def test_device_of_a_gone_claim_is_kept_while_its_namespace_has_pods(
    node: Node, driver: Driver
) -> None:
    """The kubelet lists no init containers, and before Kubernetes 1.34 no devices of claims.

    A pod continues if another user removes its claim's finalizer and deletes the claim.
    Another claim of that namespace must not remove the only record of the device either.
    """
    pods = node.folder / "pods.sock"
    gone = node.claim("gone", result(gpu(driver, 0)))
    stranger = node.claim("other", result(gpu(driver, 0)), namespace="another")
    own = node.claim("own", result(gpu(driver, 0)))
    with node.service(options={"pod_resources": str(pods)}):
        prepared(node, gone)
        node.forget(gone)
        with PodResources(pods, ("another", "pod", "main", "", ())) as kubelet:
            for claim in (stranger, own):
                _refuse(node, claim, since=True)
                _grow_old(node, gone)
                kubelet.given.append(("ns", "pod", "main", "", ()))
                _refuse(node, claim, since=False)
                _refuse(node, claim, since=False)
                kubelet.given.pop()
            _refuse(node, stranger, since=True)
            _grow_old(node, gone)
            prepared(node, stranger)


@pytest.mark.protects(
    "dra-document", "a DRA claim's CDI spec exists before the kubelet is answered", instead="pass"
)
def test_a_gone_claim_is_unprepared_without_another_request(node: Node, driver: Driver) -> None:
    """Otherwise another claim of the namespace, which has a pod, would keep it reserved forever."""
    pods = node.folder / "pods.sock"
    gone = node.claim("gone", result(gpu(driver, 0)))
    own = node.claim("own", result(gpu(driver, 0)))
    options = {"pod_resources": str(pods)}
    with PodResources(pods, ("ns", "pod", "main", "", ())) as kubelet:
        with node.service(options=options):
            prepared(node, gone)
            node.forget(gone)
            assert "delete every pod of the namespace ns from it" in refused(node, own)
        kubelet.given.clear()
        with node.service(options=options):  # it checks at once, and then every ten minutes
            wait_until(lambda: _is_known_to_be_gone(node), "it is known to be gone")
        _grow_old(node, gone)
        with node.service(options=options):
            wait_until(lambda: not node.written(), "it is put back")
            kubelet.given.append(("ns", "pod", "main", "", ()))
            prepared(node, own)


@pytest.mark.protects(
    "dra-document", "a DRA claim's CDI spec exists before the kubelet is answered", instead="pass"
)
def test_deleted_claims_are_unprepared_together(node: Node, driver: Driver) -> None:
    """A claim for the devices of several claims waits one minute in total, not one for each."""
    pods = node.folder / "pods.sock"
    claims = [node.claim(f"gone{number}", result(gpu(driver, number))) for number in range(3)]
    every = node.claim("every", *(result(gpu(driver, number)) for number in range(3)))
    with node.service(options={"pod_resources": str(pods)}), PodResources(pods):
        for claim in claims:
            prepared(node, claim)
            node.forget(claim)
        assert "which was prepared for it before" in refused(node, every)
        for claim in claims:
            _grow_old(node, claim)
        assert len(prepared(node, every)) == 3
    assert [path.name for path in node.written()] == [f"claim_{every.uid}_{GPU_DRIVER}.json"]


def test_an_unchanged_status_keeps_its_transition_time(node: Node, driver: Driver) -> None:
    """Otherwise each retry would change the claim in the cluster and trigger its watchers."""
    holder, claim = (node.claim(name, result(gpu(driver, 0))) for name in ("holder", "claim"))
    status = node.claims / "ns_claim.status"

    def written(before: bytes | None, old: str = "") -> dict[str, str]:
        wait_until(lambda: status.exists() and status.read_bytes() != before, "it is reported")
        said = json.loads(status.read_text())
        [condition] = said["devices"][0]["conditions"]
        if old:
            text = json.dumps({**said, "devices": [
                {**said["devices"][0], "conditions": [{**condition, "lastTransitionTime": old}]}
            ]}, indent=1)  # fmt: skip
            status.write_text(text)
        return {key: str(value) for key, value in condition.items()}

    with node.service():
        prepared(node, holder)
        refused(node, claim)
        then = "2020-01-02T03:04:05Z"
        written(None, then)
        before = status.read_bytes()
        refused(node, claim)
        assert written(before)["lastTransitionTime"] == then
        before = status.read_bytes()
        assert node.kubelet.unprepare(GPU_DRIVER, holder) == {holder.uid: ""}
        prepared(node, claim)
        found = written(before)
        assert (found["status"], found["reason"]) == ("True", "Prepared")
        assert found["lastTransitionTime"] > then


def _record(node: Node, claim: Claim) -> Path:
    return node.records / f"claim_{claim.uid}_{GPU_DRIVER}.json"


def _refuse(node: Node, claim: Claim, *, since: bool) -> None:
    """Check that a claim is refused, and whether the claim in its way is known to be gone."""
    assert "claim ns/gone's, which was prepared for it before" in refused(node, claim)
    assert _is_known_to_be_gone(node) is since


def _is_known_to_be_gone(node: Node) -> bool:
    [path] = node.written()
    return bool(json.loads(path.read_text())["gone"])


def _grow_old(node: Node, claim: Claim) -> None:
    """Make a claim's record say that the claim has been gone for more than a minute."""
    path = _record(node, claim)
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "gone": record["gone"] - 61}))

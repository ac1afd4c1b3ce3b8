"""gpuhook dra, killed before every file change for a claim, and the state afterwards.

SIGKILL stops the service and the child process just before the change. The kubelet's next
attempt must succeed, whatever was done until then. No other claim gets the device meanwhile,
and nothing remains.
"""

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from dra_kubelet import Claim, PodError
from harness.commands import Process, wait_until
from harness.dra import GPU_DRIVER, Node, one_node, result, slice_name
from harness.driver import Driver, simulate
from harness.installation import Installation

MOST = 60  # limit of file changes for one call, far above the real number


@pytest.fixture
def driver(installation: Installation, tmp_path: Path) -> Driver:
    return simulate(installation, tmp_path / "root", "--gpus", "2")


@pytest.fixture
def node(installation: Installation, workspace: Path, driver: Driver) -> Iterator[Node]:
    with one_node(workspace, installation, driver.root, killable=True) as made:
        yield made


class Attempt(NamedTuple):
    """A call that was killed at a point, or that finished before reaching it."""

    verb: str
    point: int
    claim: Claim
    other: Claim
    was_killed: bool


def attempt(node: Node, service: Process, verb: str, point: int, devices: list[str]) -> Attempt:
    """Call a service, which is killed at that point, with a new claim for the devices."""
    claim = node.claim("a", *(result(name) for name in devices))
    other = node.claim("b", result(devices[0]))
    if verb == "unprepare":
        assert not isinstance(node.kubelet.prepare(GPU_DRIVER, claim)[claim.uid], str)
    return again(node, service, Attempt(verb, point, claim, other, False))


def again(node: Node, service: Process, wanted: Attempt) -> Attempt:
    """Call a service with the claim of another attempt."""
    with node.killed(wanted.verb, wanted.point):
        try:
            getattr(node.kubelet, wanted.verb)(GPU_DRIVER, wanted.claim)
        except PodError:
            wait_until(lambda: service.poll() is not None, "it has ended")
            return wanted._replace(was_killed=True)
    return wanted


def check_next(node: Node, before: Attempt, devices: list[str]) -> None:
    """Check that the next service handles the state that an attempt left."""
    claim, other = before.claim, before.other
    if before.was_killed:
        held = [each.stem.split("_")[1] for each in node.written()]
        found = node.kubelet.prepare(GPU_DRIVER, other)[other.uid]
        assert isinstance(found, str) == (claim.uid in held), (before, found)
        node.kubelet.unprepare(GPU_DRIVER, other)
    prepared = node.kubelet.prepare(GPU_DRIVER, claim)[claim.uid]
    assert [each.name for each in prepared] == devices, before  # type: ignore[union-attr]
    assert node.document(claim)["devices"]
    assert node.kubelet.unprepare(GPU_DRIVER, claim) == {claim.uid: ""}
    assert node.left() == [], before


@pytest.mark.parametrize(
    ("verb", "was_killed_before", "least"),
    [("prepare", False, 15), ("unprepare", False, 5), ("prepare", True, 15)],
)
def test_a_kill_at_every_point_of_prepare_and_unprepare_is_recovered(
    node: Node, driver: Driver, verb: str, was_killed_before: bool, least: int
) -> None:
    """After each repair of the state from the last kill, the service gets one more request."""
    devices = [slice_name(gpu.uuid) for gpu in driver.gpus]
    before: Attempt | None = None
    for point in range(1, MOST):
        with node.service() as service:
            if before is not None:
                check_next(node, before, devices)
            if before is not None and not before.was_killed:
                break
            first = 12 if was_killed_before else point  # has the record and a part of the CDI spec
            before = attempt(node, service, verb, first, devices)
        if was_killed_before:
            assert before.was_killed
            with node.service() as service:
                before = again(node, service, before._replace(point=point, was_killed=False))
    assert before is not None
    assert before.point > least


def test_a_kill_at_every_point_of_cleanup_is_recovered(node: Node, driver: Driver) -> None:
    """Claims of an earlier boot are unprepared at the start, however often that is killed."""
    claim = node.claim("a", result(slice_name(driver.gpus[0].uuid)))
    with node.service():
        node.kubelet.prepare(GPU_DRIVER, claim)
    [record] = node.written()
    written = json.loads(record.read_text())
    record.write_text(json.dumps({**written, "boot": "an earlier one"}))
    kept = [(path, path.read_bytes()) for path in (record, *node.documents())]
    for point in range(1, MOST):
        for path, data in kept:
            path.write_bytes(data)
        with node.killed("sweep", point), node.service(ready=lambda: True) as process:
            wait_until(
                lambda: process.poll() is not None or not node.left(),
                "it was killed, or is done",
            )
        with node.service():
            wait_until(lambda: not node.left(), "nothing is left")
        if process.returncode != -signal.SIGKILL:
            break
    assert point > 3


def test_a_killed_claim_whose_pod_is_deleted_leaves_nothing(node: Node, driver: Driver) -> None:
    """The claim isn't prepared again, and the kubelet unprepares claims that it doesn't know."""
    devices = [slice_name(driver.gpus[0].uuid)]
    killed: Attempt | None = None
    for point in (4, 6, 8, 10, 12, None):
        with node.service() as service:
            if killed is not None:
                node.forget(killed.claim)
                assert node.kubelet.unprepare(GPU_DRIVER, killed.claim) == {killed.claim.uid: ""}
                assert node.left() == [], killed
            if point is not None:
                killed = attempt(node, service, "prepare", point, devices)
                assert killed.was_killed

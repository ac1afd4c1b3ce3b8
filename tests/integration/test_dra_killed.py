"""gpuhook dra, killed at every change of a file that a claim's work makes, and what is left then.

The service and the child end by SIGKILL just before the change. Whatever was done until then, the
kubelet's next attempt ends well, no other claim gets the device meanwhile, and nothing is left.
"""

import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from dra_kubelet import PodError
from harness.commands import wait_until
from harness.dra import GPU_DRIVER, Node, result, slice_name
from harness.driver import Driver, simulate
from harness.installation import Installation, write_config

MOST = 60  # changes of files for one call, far more than there are


@pytest.fixture
def driver(installation: Installation, tmp_path: Path) -> Driver:
    return simulate(installation, tmp_path / "root", "--gpus", "2")


@pytest.fixture
def node(
    installation: Installation, workspace: Path, tmp_path: Path, driver: Driver
) -> Iterator[Node]:
    config = write_config(tmp_path / "config", driver.root, ["runc"])
    made = Node(workspace / f"k{hash(tmp_path) & 0xFFFFFFFF:x}", installation, config)
    with made.kubelet:
        yield made


def test_killed_at_every_point_of_prepare_and_unprepare(node: Node, driver: Driver) -> None:
    names = [slice_name(gpu.uuid) for gpu in driver.gpus]
    kills = 0
    for verb, was_killed_before in (("prepare", False), ("unprepare", False), ("prepare", True)):
        for point in range(1, MOST):
            claim = node.claim("a", *(result(name) for name in names))
            other = node.claim("b", result(names[0]))
            if verb == "unprepare":
                with node.service():
                    assert not isinstance(node.kubelet.prepare(GPU_DRIVER, claim)[claim.uid], str)
            if was_killed_before:  # with the record and a part of the document there
                with node.service(kill=("prepare", 12)), suppress(PodError):
                    node.kubelet.prepare(GPU_DRIVER, claim)
            with node.service(kill=(verb, point)) as process:
                try:
                    getattr(node.kubelet, verb)(GPU_DRIVER, claim)
                    was_killed = False
                except PodError:
                    was_killed = True
                    wait_until(lambda: process.poll() is not None, "it has ended")
            with node.service():
                if was_killed:
                    kills += 1
                    held = [each.stem.partition("_")[0] for each in node.written()]
                    found = node.kubelet.prepare(GPU_DRIVER, other)[other.uid]
                    assert isinstance(found, str) == (claim.uid in held), (verb, point, found)
                    node.kubelet.unprepare(GPU_DRIVER, other)
                again = node.kubelet.prepare(GPU_DRIVER, claim)[claim.uid]
                assert [each.name for each in again] == names, (verb, point)  # type: ignore[union-attr]
                assert node.document(claim)["devices"]
                assert node.kubelet.unprepare(GPU_DRIVER, claim) == {claim.uid: ""}
                assert node.left() == [], (verb, point)
            if not was_killed:
                break
    assert kills >= 40, kills


def test_killed_while_tidying_up(node: Node, driver: Driver) -> None:
    """Claims of an earlier boot are put back at the start, however often that is killed."""
    claim = node.claim("a", result(slice_name(driver.gpus[0].uuid)))
    with node.service():
        node.kubelet.prepare(GPU_DRIVER, claim)
    [record] = node.written()
    record.write_text(record.read_text().replace('"boot": "', '"boot": "x'))
    kept = [(path, path.read_bytes()) for path in (record, *node.documents())]
    for point in range(1, MOST):
        for path, data in kept:
            path.write_bytes(data)
        with node.service(ready=lambda: True, kill=("sweep", point)) as process:
            wait_until(
                lambda: process.poll() is not None or not node.left(),
                "it was killed, or is done",
            )
        with node.service():
            wait_until(lambda: not node.left(), "nothing is left")
        if process.returncode != -signal.SIGKILL:
            break
    assert point > 3


def test_killed_and_the_pod_is_gone(node: Node, driver: Driver) -> None:
    """Nobody prepares the claim again: the kubelet puts back what it doesn't know to be there."""
    for point in (4, 6, 8, 10, 12):
        claim = node.claim("a", result(slice_name(driver.gpus[0].uuid)))
        with node.service(kill=("prepare", point)), pytest.raises(PodError):
            node.kubelet.prepare(GPU_DRIVER, claim)
        node.forget(claim)
        with node.service():
            assert node.kubelet.unprepare(GPU_DRIVER, claim) == {claim.uid: ""}
            assert node.left() == [], point

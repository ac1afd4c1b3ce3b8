"""gpuhook dra while devices fail and recover, while a driver hangs, and while it is idle."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from dra_kubelet import HEALTHY, UNHEALTHY, UNKNOWN
from dra_rest import memory, woken
from harness.commands import run, wait_until
from harness.dra import GPU_DRIVER, Node, one_node, result, slice_name
from harness.driver import Driver, simulate
from harness.installation import Installation
from harness.node import children, listens, spent


@pytest.fixture
def driver(installation: Installation, tmp_path: Path) -> Driver:
    return simulate(installation, tmp_path / "root", "--gpus", "8")


@pytest.fixture
def node(installation: Installation, workspace: Path, driver: Driver) -> Iterator[Node]:
    with one_node(workspace, installation, driver.root) as made:
        text = made.config.read_text()
        made.config.write_text(text.replace("[gpuhook]\n", "[gpuhook]\nnvml-timeout = 0.5\n"))
        yield made


def has(node: Node, device: str, health: int, words: str = "") -> bool:
    """Return whether the kubelet has this health for a device, and healthy for all others."""
    plugin = node.kubelet.instances(GPU_DRIVER)
    found = plugin[-1].devices if plugin else {}
    about = found.get(("n1", device))
    others = {each.health for name, each in found.items() if name != ("n1", device)}
    return (
        about is not None
        and about.health == health
        and words in about.message
        and others == {HEALTHY}
    )


@pytest.mark.protects(
    "dra-lost",
    "a DRA claim gets no device that can't be reached",
    instead="if known is None or known.device is None:",
)
@pytest.mark.parametrize("service", ["v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth"])
def test_an_xid_makes_a_device_unhealthy_until_it_recovers(
    service: str, node: Node, driver: Driver
) -> None:
    node.kubelet.knows = ("v1.DRAPlugin", service)
    name = slice_name(driver.gpus[3].uuid)
    with node.service(recovery=2.0) as process:
        wait_until(lambda: listens(process.pid), "there is a listener")
        node.kubelet.wait_until(lambda: has(node, name, HEALTHY), "all are well")
        began = time.monotonic()
        command: list[str | Path] = [node.installation.command, "simulate", driver.root]
        run([*command, "--xid=79", "--gpu=3"]).ok()
        node.kubelet.wait_until(lambda: has(node, name, UNHEALTHY, "XID 79"), "one is unwell")
        assert time.monotonic() - began < 25  # the next regular check is after 30 seconds
        node.kubelet.wait_until(lambda: has(node, name, HEALTHY), "it is well again")
        run([*command, "--lost=3"]).ok()
        node.kubelet.wait_until(lambda: has(node, name, UNHEALTHY), "it is lost")
        claim = node.claim("a", result(name))
        found = node.kubelet.prepare(GPU_DRIVER, claim)[claim.uid]
        assert isinstance(found, str), found
        run([*command, "--found=3"]).ok()
        node.kubelet.wait_until(lambda: has(node, name, HEALTHY), "it is back")
        assert not isinstance(node.kubelet.prepare(GPU_DRIVER, claim)[claim.uid], str)


@pytest.mark.protects("dra-hangs", "a DRA claim gets no device while its driver hangs")
def test_a_hung_driver_refuses_new_claims_and_old_ones_are_unprepared(
    node: Node, driver: Driver, installation: Installation
) -> None:
    """New claims get an error within the kubelet's time limit; old claims can be unprepared."""
    name = slice_name(driver.gpus[0].uuid)
    before = node.claim("before", result(name))
    with node.service(interval=0.2):
        node.kubelet.prepare(GPU_DRIVER, before)
        simulate(installation, driver.root, "--gpus", "8", "--init-seconds=3600")
        node.kubelet.wait_until(
            lambda: (
                {each.health for each in node.kubelet.wait(GPU_DRIVER).devices.values()}
                == {UNKNOWN}
            ),
            "nothing is known any more",
        )
        began = time.monotonic()
        claim = node.claim("a", result(slice_name(driver.gpus[1].uuid)))
        found = node.kubelet.prepare(GPU_DRIVER, claim)[claim.uid]
        assert "can't be allocated now" in found
        assert node.kubelet.unprepare(GPU_DRIVER, before) == {before.uid: ""}
        assert time.monotonic() - began < 600
        assert node.left() == []


def test_an_idle_service_uses_little_processor_time(node: Node) -> None:
    """The test counts wakeups, because the time for each depends on other programs."""
    with node.service(interval=30.0) as process:
        node.kubelet.wait(GPU_DRIVER)
        wait_until(lambda: listens(process.pid), "there is a listener")
        claim = node.claim("a")
        node.kubelet.prepare(GPU_DRIVER, claim)
        usual = {"gpuhook-events", "gpuhook-server"}
        wait_until(lambda: {*children(process.pid)} == usual, "the claims' children have ended")
        pids = [process.pid, *children(process.pid).values()]
        wait_until(
            lambda: memory(pids) < 52 << 20, "little memory", shown=lambda: str(memory(pids))
        )
        woken_before, spent_before, began = woken(pids), sum(map(spent, pids)), time.monotonic()
        time.sleep(20.0)
        seconds = time.monotonic() - began
        # Causes are checks of the host and of folders, and the listener's beats: 17 in 20 s.
        often = (woken(pids) - woken_before) / seconds
        # Below 0.1 % of a processor if nothing else runs, and more in addition to other work.
        used = (sum(map(spent, pids)) - spent_before) / seconds
        assert (often < 1.5, used < 0.02) == (True, True), (often, used)

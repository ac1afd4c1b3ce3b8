"""Metrics of gpuhook dra and gpuhook device-plugin, as a kubelet's calls change them."""

import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import wire
from dra_kubelet import Claim
from harness.commands import wait_until
from harness.dra import GPU_DRIVER, result, slice_name
from harness.dra import Node as DraNode
from harness.driver import simulate
from harness.installation import Installation, write_config
from harness.node import GPUS, Node, children, plugin_node
from prometheus_client.parser import text_string_to_metric_families

ANYWHERE = "127.0.0.1:0"


@pytest.fixture
def node(workspace: Path, installation: Installation) -> Iterator[Node]:
    with plugin_node(installation, workspace) as made:
        yield made


@pytest.fixture
def dra_node(installation: Installation, workspace: Path, tmp_path: Path) -> Iterator[DraNode]:
    driver = simulate(installation, tmp_path / "root", "--gpus", "2")
    config = write_config(tmp_path / "config", driver.root, ["runc"])
    made = DraNode(workspace / f"s{hash(tmp_path) & 0xFFFFFFFF:x}", installation, config)
    made.gpus = [slice_name(gpu.uuid) for gpu in driver.gpus]  # type: ignore[attr-defined]
    with made.kubelet:
        yield made


def series(log: str, start: str) -> dict[tuple[str, ...], float]:
    """Return the page's samples, by name without the prefix and by label values."""
    [url] = re.findall(r"Metrics at (http://\S+/metrics)", log)
    with urllib.request.urlopen(url, timeout=60) as answer:  # noqa: S310
        text = answer.read().decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for each in family.samples:
            assert each.name.startswith(start)
            values = [each.labels[name] for name in sorted(each.labels)]
            found[(each.name.removeprefix(start), *values)] = each.value
    return found


def test_device_plugin_allocations_and_failures_are_counted(node: Node) -> None:
    start = "gpuhook_device_plugin_allocation"

    def found() -> dict[tuple[str, ...], float]:
        return series(node.log.read_text(), start)

    node.simulate("--gpus=2")
    node.start(metrics_listen=ANYWHERE)
    node.healthy(2, 2)
    assert found() == {}
    node.kubelet.admit("pod", {GPUS: 1})
    wrong = wire.message((1, wire.message((1, "nothing"))))
    with pytest.raises(grpc.RpcError):
        node.kubelet.call(GPUS, "Allocate", wrong)
    node.until(lambda: found().get(("s_total", GPUS)) == 2, "both are counted")
    now = found()
    assert now["_failures_total", GPUS] == 1
    assert now["_seconds_count", GPUS] == now["_seconds_bucket", "+Inf", GPUS] == 2
    assert 0 < now["_seconds_sum", GPUS] < 60
    uid = Path(f"/proc/{node.child('gpuhook-http')}/status").read_text()
    assert re.search(r"^Uid:\s+65534\s", uid, re.MULTILINE)


def test_no_metrics_port_is_opened_without_an_address(node: Node) -> None:
    node.simulate("--gpus=1")
    node.start()
    node.healthy(1, 1)
    node.kubelet.admit("pod", {GPUS: 1})
    assert "gpuhook-http" not in children(node.pid)
    assert not node.said("Metrics at")


def test_an_invalid_metrics_address_ends_the_service_with_an_error(node: Node) -> None:
    node.simulate("--gpus=1")
    node.start(metrics_listen="nowhere")
    assert node.process is not None
    assert node.process.wait(60) != 0
    assert node.said("'nowhere' isn't an address")


def test_prepared_and_failed_dra_claims_are_counted(dra_node: DraNode) -> None:
    start = "gpuhook_dra_claim"
    node, gpus = dra_node, dra_node.gpus  # type: ignore[attr-defined]

    def found() -> dict[tuple[str, ...], float]:
        return series(node.log, start)

    good = node.claim("good", result(gpus[0]))
    bad = node.claim("bad", result("gpu-that-never-was"))
    with node.service(options={"metrics_listen": ANYWHERE}):
        assert found() == {}
        said: dict[str, object] = dict(node.kubelet.prepare(GPU_DRIVER, good, bad))
        assert isinstance(said[bad.uid], str)
        node.kubelet.unprepare(GPU_DRIVER, good)
        node.kubelet.prepare(GPU_DRIVER)  # a kubelet's probe has no claims
        node.kubelet.unprepare(GPU_DRIVER, Claim("ns", "never", "0-1"))
        wait_until(lambda: found().get(("s_total", GPU_DRIVER, "unprepare")) == 2, "all counted")
        now = found()
    assert now["s_total", GPU_DRIVER, "prepare"] == 2
    assert now["_failures_total", GPU_DRIVER, "prepare"] == 1
    assert now["_failures_total", GPU_DRIVER, "unprepare"] == 0
    assert now["_seconds_count", GPU_DRIVER, "prepare"] == 2
    assert now["_seconds_sum", GPU_DRIVER, "prepare"] > 0
    assert {key[1] for key in now if key[0] == "s_total"} == {GPU_DRIVER}

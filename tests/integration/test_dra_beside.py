"""gpuhook dra and gpuhook device-plugin on one node: neither allocates the other's devices."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from dra_kubelet import Claim
from harness.device_plugin import device_plugin
from harness.dra import GPU_DRIVER, Node, one_node, result, slice_name
from harness.driver import Driver, simulate
from harness.installation import Installation
from kubelet import AdmissionError
from pod_resources import PodResources

GPU = "nvidia.com/gpu"


@pytest.fixture
def driver(installation: Installation, tmp_path: Path) -> Driver:
    words = ("--gpus", "2", "--set", "model=H100", "--set", "mig=1:1g.10gb,1g.10gb")
    return simulate(installation, tmp_path / "root", *words)


@pytest.fixture
def node(installation: Installation, workspace: Path, driver: Driver) -> Iterator[Node]:
    with one_node(workspace, installation, driver.root) as made:
        yield made


def asked(node: Node, claim: Claim) -> str:
    """Return the error of preparing a claim, or "" if it was prepared."""
    found = node.kubelet.prepare(GPU_DRIVER, claim)[claim.uid]
    return found if isinstance(found, str) else ""


def grow_old(node: Node) -> None:
    """Make the device plugin's records ten minutes older."""
    for path in node.records.glob("pod_*"):
        record = json.loads(path.read_text())
        path.write_text(json.dumps({**record, "at": record["at"] - 600}))


@pytest.mark.protects(
    "dra-not-twice-plugin",
    "the device plugin allocates no device that a DRA claim has",
    instead="for ours, record in ():",
)
@pytest.mark.protects(
    "dra-not-twice-claim", "a DRA claim gets no device that the device plugin has allocated"
)
def test_claims_and_device_plugin_never_share_a_device(
    node: Node, driver: Driver, installation: Installation, workspace: Path
) -> None:
    whole = node.claim("whole", result(slice_name(driver.gpus[0].uuid)))
    pods = node.folder / "pods.sock"
    folder = node.folder / "dp"
    with (
        node.service(options={"pod_resources": str(pods)}),
        device_plugin(folder, installation, node.config, GPU) as plugin,
    ):
        assert asked(node, whole) == ""
        with pytest.raises(AdmissionError, match="is allocated to claim ns/whole by gpuhook dra"):
            _admit(plugin, "one", driver.gpus[0].uuid)
        node.kubelet.unprepare(GPU_DRIVER, whole)
        _admit(plugin, "one", driver.gpus[0].uuid)
        assert "device-plugin has allocated the device" in asked(node, whole)
        grow_old(node)
        assert "doesn't report whether its pod ended" in asked(node, whole)
        given = ("ns", "one", "main", GPU, (driver.gpus[0].uuid,))
        with PodResources(pods, given) as kubelet:
            assert f"to a pod as {GPU}" in asked(node, whole)
            kubelet.given.clear()
            assert asked(node, whole) == ""
        # The service remembers what it allocated however often it is killed. A new boot forgets it.
        with pytest.raises(AdmissionError, match="claim ns/whole "):
            _admit(plugin, "two", driver.gpus[0].uuid)


@pytest.mark.protects(
    "dra-not-twice-plugin",
    "the device plugin allocates no device that a DRA claim has",
    instead="for ours, record in ():",
)
@pytest.mark.protects(
    "dra-not-twice-claim", "a DRA claim gets no device that the device plugin has allocated"
)
def test_a_gpu_and_its_mig_parts_are_not_allocated_together(
    node: Node, driver: Driver, installation: Installation, workspace: Path
) -> None:
    """If a claim has a part, the whole GPU isn't allocated, and vice versa."""
    plugin_folder = node.folder / "dp"
    with (
        node.service(),
        device_plugin(plugin_folder, installation, node.config, GPU) as plugin,
    ):
        health = node.kubelet.wait(GPU_DRIVER)
        node.kubelet.wait_until(lambda: health.lists > 0, "health is said")
        parts = sorted(name for _, name in health.devices if "-mig-" in name)
        assert len(parts) == 2
        first, second = (node.claim(name, result(name)) for name in parts)
        assert asked(node, first) == asked(node, second) == ""
        with pytest.raises(AdmissionError, match=r"is allocated to claim .* by gpuhook dra"):
            _admit(plugin, "one", driver.gpus[1].uuid)
        for each in (first, second):
            node.kubelet.unprepare(GPU_DRIVER, each)
        _admit(plugin, "one", driver.gpus[1].uuid)
        assert "device-plugin has allocated the device" in asked(node, first)


def _admit(plugin: object, pod: str, uuid: str) -> None:
    """Let the kubelet allocate that GPU to a pod."""
    choose = plugin._choose  # type: ignore[attr-defined]
    plugin._choose = lambda *_: [uuid]  # type: ignore[attr-defined]
    try:
        plugin.admit(pod, {GPU: 1})  # type: ignore[attr-defined]
    finally:
        plugin._choose = choose  # type: ignore[attr-defined]

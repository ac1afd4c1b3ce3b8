"""The image's device plugin, run by podman as the DaemonSet would, with a simulated kubelet."""

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from harness.commands import wait_until
from harness.driver import Driver
from harness.manifests import containers, daemon_set, pod_of
from harness.podman_node import Node, node
from kubelet import Kubelet, Mount

GPUS = "nvidia.com/gpu"
HOOK = "/opt/gpuhook/bin/gpuhook-cdi-hook"


@pytest.fixture(scope="module")
def kept(workspace: Path, node_image: Path) -> Iterator[Node]:
    with node(workspace / "plugin-node", node_image) as made:
        yield made


@pytest.fixture
def kubelet(workspace: Path) -> Iterator[Kubelet]:
    with tempfile.TemporaryDirectory(prefix="kubelet-", dir=workspace) as folder:
        made = Kubelet(Path(folder) / "plugins")
        made.start()
        yield made
        made.stop()


@contextmanager
def plugin(kept: Node, variant: str, kubelet: Kubelet, host: Mapping[str, str]) -> Iterator[str]:
    """Run a variant's plugin, with the kubelet's folder, until the end of the block."""
    places = {"/var/lib/kubelet/device-plugins": str(kubelet.folder), **host}
    document = daemon_set(variant, "device-plugin")
    container = kept.begin(document, "device-plugin", host=places)
    try:
        yield container
        kept.podman.call("kill", "--signal=TERM", container).ok()
        kept.end(container).ok()
    finally:
        kept.podman.call("rm", "--force", container)


def offered(kept: Node, container: str, kubelet: Kubelet, count: int) -> None:
    """Wait until the kubelet knows that many healthy GPUs."""
    try:
        wait_until(
            lambda: GPUS in kubelet.resources() and kubelet.allocatable(GPUS) == count,
            f"{count} GPUs are offered",
        )
    except AssertionError as error:
        log = kept.podman.call("logs", container)
        raise AssertionError(f"{error}\n{log}") from None


def test_the_base_offers_all_gpus_also_after_a_kubelet_restart(
    kept: Node, kubelet: Kubelet, driver: Driver
) -> None:
    with plugin(kept, "base", kubelet, {"/": str(driver.root)}) as container:
        offered(kept, container, kubelet, len(driver.gpus))
        assert set(kubelet.devices(GPUS)) == {gpu.uuid for gpu in driver.gpus}
        answers = kubelet.admit("pod", {GPUS: 2})
        places = {f"/var/run/nvidia-container-devices/{each}" for each in answers["ids"][GPUS]}
        assert {mount.container for mount in answers["mounts"]} == places
        assert len(places) == 2
        kubelet.restart()
        offered(kept, container, kubelet, len(driver.gpus))


def test_environment_overlay_passes_devices_by_variable(
    kept: Node, kubelet: Kubelet, driver: Driver
) -> None:
    host = {"/": str(driver.root)}
    with plugin(kept, "overlays/environment", kubelet, host) as container:
        offered(kept, container, kubelet, len(driver.gpus))
        answers = kubelet.admit("pod", {GPUS: 1})
        assert answers["envs"]["NVIDIA_VISIBLE_DEVICES"] == answers["ids"][GPUS][0]
        assert answers["mounts"] == []


def test_an_invalid_config_map_is_refused_by_the_plugin(
    kept: Node, kubelet: Kubelet, driver: Driver, tmp_path: Path
) -> None:
    (tmp_path / "config.toml").write_text("disable-require = 3\n")
    host = {"/": str(driver.root), "/var/lib/kubelet/device-plugins": str(kubelet.folder)}
    host["gpuhook-config"] = str(tmp_path)
    container = kept.begin(daemon_set("base", "device-plugin"), "device-plugin", host=host)
    ended = kept.end(container).failed()
    assert "/etc/gpuhook/config.toml" in ended.stderr


def test_a_recreated_kubelet_folder_ends_the_plugin(
    kept: Node, kubelet: Kubelet, driver: Driver
) -> None:
    """The plugin's pod has the deleted folder mounted; only a new container gets the new one."""
    document = daemon_set("base", "device-plugin")
    settings = containers(pod_of(document))["device-plugin"]["env"]
    settings.append({"name": "GPUHOOK_INTERVAL", "value": "0.5"})
    host = {"/": str(driver.root), "/var/lib/kubelet/device-plugins": str(kubelet.folder)}
    container = kept.begin(document, "device-plugin", host=host)
    try:
        offered(kept, container, kubelet, len(driver.gpus))
        kubelet.stop()
        while kubelet.folder.exists():  # the plugin may create a new socket there
            shutil.rmtree(kubelet.folder, ignore_errors=True)
        kubelet.folder.mkdir()
        wait_until(lambda: not kept.is_running(container), "the plugin has ended")
        assert "was deleted on the node" in kept.end(container).failed().stderr
    finally:
        kept.podman.call("rm", "--force", "--ignore", container)


def test_on_a_node_without_a_driver_the_plugin_waits(
    kept: Node, kubelet: Kubelet, tmp_path: Path
) -> None:
    """The plugin waits, and serves a driver as soon as one appears."""
    with plugin(kept, "base", kubelet, {"/": str(tmp_path)}) as container:
        wait_until(lambda: "driver" in kept.podman.call("logs", container).stderr, "it says so")
        assert kubelet.resources() == []


def test_the_mounts_overlay_answers_with_paths_of_the_node(
    kept: Node, kubelet: Kubelet, driver: Driver
) -> None:
    """Answers have paths of the node, and not those that the plugin sees."""
    with plugin(kept, "overlays/mounts", kubelet, {"/": str(driver.root)}) as container:
        offered(kept, container, kubelet, len(driver.gpus))
        answers = kubelet.admit("pod", {GPUS: 1})
        assert Mount("/usr/local/nvidia", "/var/lib/gpuhook/driver", True) in answers["mounts"]
        library = kept.path("/var/lib/gpuhook/driver/lib64/libcuda.so.1")
        wait_until(library.exists, "the folder on the node holds the driver")
        assert "/dev/nvidiactl" in {each.host for each in answers["devices"]}
        assert all(each.host == each.container for each in answers["devices"])


def test_the_cdi_overlay_writes_a_spec_with_paths_of_the_node(
    kept: Node, kubelet: Kubelet, driver: Driver, tmp_path: Path
) -> None:
    """The CDI spec names the hook and the files by their paths on the node."""
    host = {"/": str(driver.root), "/var/run/cdi": str(tmp_path)}
    with plugin(kept, "overlays/cdi-pod", kubelet, host) as container:
        offered(kept, container, kubelet, len(driver.gpus))
        wait_until(lambda: bool(os.listdir(tmp_path)), "there is a document")
        document = yaml.safe_load((tmp_path / "nvidia.com-gpu.yaml").read_text())
        names = {f"{GPUS}={device['name']}" for device in document["devices"]}
        assert set(kubelet.admit("pod", {GPUS: 2})["cdi_devices"]) <= names
        edits = [
            document["containerEdits"],
            *(each["containerEdits"] for each in document["devices"]),
        ]
        hooks = {hook["path"] for each in edits for hook in each.get("hooks", [])}
        assert hooks == {HOOK}
        sources = [mount["hostPath"] for each in edits for mount in each.get("mounts", [])]
        nodes = [
            node.get("hostPath", node["path"])
            for each in edits
            for node in each.get("deviceNodes", [])
        ]
        assert nodes
        assert not [path for path in [*sources, *nodes] if path.startswith("/driver-root")]

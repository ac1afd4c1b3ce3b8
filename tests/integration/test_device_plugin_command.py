"""The command gpuhook device-plugin, with a simulated driver and a kubelet."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.commands import Process, background, run, stop, wait_until
from harness.driver import Driver, simulate
from harness.forked import PROGRAM
from harness.installation import Installation, write_config
from harness.metrics import GPUHOOK
from kubelet import AdmissionError, Answers, Kubelet, Mount

GPUS = "nvidia.com/gpu"
VARIABLE = "NVIDIA_VISIBLE_DEVICES"
FOLDER = "/var/run/nvidia-container-devices"


class Node:
    """A host with eight simulated GPUs, a kubelet, and the plugin as a process."""

    def __init__(self, installation: Installation, root: Path, folder: Path) -> None:
        self.root = root
        self.folder = folder
        self.kubelet = Kubelet(folder / "kubelet")
        self.log = folder / "log"
        self._installation = installation
        self._config = write_config(folder / "config", self.root, ["runc"])
        self._process: Process | None = None

    def argv(self, *words: str) -> list[str]:
        program = [sys.executable, "-c", PROGRAM, str(self._installation.command)]
        return [*program, "device-plugin", "--config", str(self._config), *words]

    def start(self, *words: str, **environ: str) -> Kubelet:
        """Start kubelet and plugin."""
        self.kubelet.start()
        socket = f"--kubelet-socket={self.kubelet.folder}/kubelet.sock"
        self.log.write_text("")
        self._process = background(self.argv(socket, *words), self.log, environ)
        return self.kubelet

    def offers(self, resource: str, count: int) -> None:
        """Wait until the kubelet has this number of healthy devices."""
        kubelet = self.kubelet

        def met() -> bool:
            assert self._process is not None
            assert self._process.poll() is None, self.log.read_text()
            return resource in kubelet.resources() and kubelet.allocatable(resource) == count

        try:
            wait_until(met, f"{count} {resource}")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log.read_text()}") from None

    def uuids(self) -> list[str]:
        return sorted(self.kubelet.devices(GPUS))

    def said(self) -> str:
        return self.log.read_text()

    def end(self) -> None:
        if self._process is not None and self._process.poll() is None:
            stop(self._process)
        self.kubelet.stop()


@pytest.fixture
def node(workspace: Path, installation: Installation, driver: Driver) -> Iterator[Node]:
    with tempfile.TemporaryDirectory(prefix="node-", dir=workspace) as folder:
        made = Node(installation, driver.root, Path(folder))
        try:
            yield made
        finally:
            made.end()


def admitted(node: Node, count: int = 2) -> Answers:
    node.offers(GPUS, 8)
    return node.kubelet.admit("pod", {GPUS: count})


def test_envvar_strategy_passes_devices_by_variable(node: Node) -> None:
    node.start(DEVICE_LIST_STRATEGY="envvar", GDS_ENABLED="true")
    answer = admitted(node)
    assert answer["envs"] == {VARIABLE: ",".join(answer["ids"][GPUS]), "NVIDIA_GDS": "enabled"}
    assert {*answer["ids"][GPUS]} <= {*node.uuids()}
    assert (answer["mounts"], answer["devices"], answer["cdi_devices"]) == ([], [], [])


def test_changed_settings_restart_the_plugin(node: Node) -> None:
    """The plugin restarts itself with the new settings, and SIGTERM still stops it afterwards."""
    settings = node.folder / "config/config.toml"
    before = settings.read_text()
    words = [*GPUHOOK, "device-plugin", "--config", str(settings), "--interval=0.2"]
    words += [f"--kubelet-socket={node.kubelet.folder}/kubelet.sock"]
    words += ["--device-list-strategy=cdi-cri", f"--cdi-folder={node.folder}/cdi"]
    node.kubelet.start()
    node.log.write_text("")
    with node.log.open("wb") as log, subprocess.Popen(words, stderr=log) as process:
        try:
            wait_until(lambda: node.kubelet.allocatable(GPUS) == 8, "it serves", shown=node.said)
            settings.write_text(f'{before}[gpuhook.mps]\ndevices = "0,1"\n')
            # No CDI spec can make a container a client of MPS.
            wait_until(lambda: node.kubelet.allocatable(GPUS) == 6, "two less", shown=node.said)
            assert "config.toml has changed: starting again" in node.said()
            settings.write_text("[gpuhook\n")
            wait_until(lambda: "settings from before count" in node.said(), "it says so")
            settings.write_text(before)
            wait_until(lambda: node.kubelet.allocatable(GPUS) == 8, "as before", shown=node.said)
            process.terminate()
            assert process.wait(60) == 0
        finally:
            process.kill()


def test_volume_mounts_strategy_passes_mounts_and_host_device_nodes(node: Node) -> None:
    """As in a pod, the plugin sees the driver root at another path than the host does."""
    node.start(
        "--device-list-strategy=volume-mounts", "--pass-device-specs", "--driver-root=/srv/driver",
        f"--driver-root-ctr-path={node.root}",
    )  # fmt: skip
    answer = admitted(node)
    assert answer["envs"] == {VARIABLE: FOLDER}
    places = [mount.container for mount in answer["mounts"]]
    assert places == [f"{FOLDER}/{each}" for each in answer["ids"][GPUS]]
    hosts = {each.container: each.host for each in answer["devices"]}
    assert hosts["/dev/nvidiactl"] == "/srv/driver/dev/nvidiactl"
    assert sum(each.startswith("/dev/nvidia") and each[-1].isdigit() for each in hosts) == 2


def test_cdi_strategies_pass_device_names(node: Node) -> None:
    cdi = node.folder / "cdi"
    node.start(
        "--device-list-strategy", "cdi-cri,cdi-annotations", "--cdi-folder", str(cdi),
        "--cdi-hook-path=/opt/gpuhook/bin/gpuhook-cdi-hook",
    )  # fmt: skip
    answer = admitted(node)
    names = [f"{GPUS}={each}" for each in answer["ids"][GPUS]]
    assert answer["cdi_devices"] == names
    [(key, value)] = answer["annotations"].items()
    assert key.startswith("cdi.k8s.io/nvidia-device-plugin_")
    assert value == ",".join(names)
    [document] = cdi.iterdir()
    text = document.read_text()
    assert all(name.partition("=")[2] in text for name in names)
    assert "path: /opt/gpuhook/bin/gpuhook-cdi-hook" in text
    assert "every name twice" in node.log.read_text()


def test_mounts_strategy_passes_device_nodes_and_the_driver_folder(node: Node) -> None:
    node.start("--device-list-strategy=mounts", "--driver-folder=/srv/folder")
    answer = admitted(node, 1)
    assert answer["envs"] == {VARIABLE: "void"}
    assert answer["mounts"] == [Mount("/usr/local/nvidia", "/srv/folder", read_only=True)]
    assert "/dev/nvidia-uvm" in {each.container for each in answer["devices"]}


def test_sharing_by_a_config_file_offers_replicas(node: Node) -> None:
    file = node.folder / "plugin.yaml"
    file.write_text(
        "version: v1\nsharing:\n  timeSlicing:\n    renameByDefault: true\n"
        "    failRequestsGreaterThanOne: true\n    resources: [{name: gpu, replicas: 3}]\n"
    )
    kubelet = node.start(CONFIG_FILE=str(file))
    shared = f"{GPUS}.shared"
    node.offers(shared, 24)
    chosen = [kubelet.admit(f"pod{n}", {shared: 1})["envs"][VARIABLE] for n in range(4)]
    assert len({*chosen}) == 4, "each on a GPU of its own"
    with pytest.raises(AdmissionError, match=r"may have one nvidia\.com/gpu\.shared"):
        kubelet.admit("greedy", {shared: 2})


def test_gpus_of_one_numa_node_are_allocated_together(node: Node) -> None:
    kubelet = node.start()
    node.offers(GPUS, 8)
    near = {name: device.numa for name, device in kubelet.devices(GPUS).items()}
    assert len({*near.values()}) == 2
    for pod in ("one", "two"):
        ids = kubelet.admit(pod, {GPUS: 2})["ids"][GPUS]
        assert len({near[each] for each in ids}) == 1


def test_dry_run_shows_the_devices_reported_to_the_kubelet(node: Node) -> None:
    node.start()
    node.offers(GPUS, 8)
    text = run(node.argv("--dry-run")).ok().stdout
    rows = [line.split() for line in text.splitlines()[1:9]]
    assert sorted(row[1] for row in rows) == node.uuids()
    assert {row[-1] for row in rows} == {"healthy"}


def test_a_dry_run_asks_the_driver(
    installation: Installation, workspace: Path, tmp_path: Path
) -> None:
    """A saved inventory may be older than the loss of a GPU."""
    root = workspace / f"lost-{os.getpid()}"
    try:
        built = simulate(installation, root, "--gpus", "2", "--model", "T4")
        node = Node(installation, root, tmp_path)
        assert run(node.argv("--dry-run")).ok().stdout.count("  healthy") == 2
        run([installation.command, "simulate", str(root), "--lost", "1"]).ok()
        text = run(node.argv("--dry-run")).ok().stdout
        [row] = [line for line in text.splitlines() if built.gpus[1].uuid in line]
        assert "unhealthy: " in row
        assert "fallen off the bus" in row
    finally:
        run([installation.command, "simulate", str(root), "--remove"])


def test_an_invalid_option_value_is_refused(node: Node) -> None:
    done = run(node.argv("--mig-strategy", "all"))
    assert done.status == 1
    assert "must be one of none, single, mixed" in done.stderr

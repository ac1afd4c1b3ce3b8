"""The device plugin's status, as the installer's readiness probe reports it."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from kubelet import Kubelet
from plugin_server import PluginServer, gpus

from gpuhook.cluster.device_plugin.status import FOLDER, NAME, StatusFile

PROBE = Path(__file__).parents[4] / "packaging/kubernetes/image/node-ready"
AMD = "amd.com/gpu"


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="gk") as top:
        yield Path(top)


def probe(folder: Path) -> str:
    """Return the message of the readiness probe, or "" if the node is ready."""
    text = PROBE.read_text()
    place = f'"{FOLDER}/{NAME}"'
    assert place in text
    text = text.replace(place, repr(f"{folder}/state/{NAME}"))
    done = subprocess.run(
        [sys.executable, "-IS", "-c", text], capture_output=True, text=True, check=False
    )
    assert done.returncode == (1 if done.stdout else 0), done
    assert done.stderr == ""
    return done.stdout


def test_the_status_is_ready_only_while_registered(folder: Path) -> None:
    kubelet = Kubelet(folder / "dp")
    assert "hasn't run yet" in probe(folder)
    with PluginServer(folder / "dp", state_dir=f"{folder}/state") as server:
        kubelet.wait_until(lambda: "no device to offer" in probe(folder), "the server runs")
        server.report(gpus())
        missing = "waiting for the kubelet: "
        kubelet.wait_until(lambda: missing in probe(folder), "it has tried to register")
        kubelet.start()
        kubelet.wait_until(lambda: probe(folder) == "", "it is registered")
        kubelet.stop()
        kubelet.wait_until(lambda: "nvidia.com/gpu: " in probe(folder), "it isn't any more")
        kubelet.start()
        kubelet.wait_until(lambda: probe(folder) == "", "it is registered again")
        server.report(gpus(), gpus(2, name=AMD))
        kubelet.wait_until(lambda: AMD in (folder / "state" / NAME).read_text(), "another resource")
        server.report(gpus(2, name=AMD))
        text = (folder / "state" / NAME).read_text
        kubelet.wait_until(
            lambda: "nvidia.com/gpu" not in text() and probe(folder) == "", "one is gone"
        )
        kubelet.stop()
    assert "isn't active" in probe(folder)


def test_a_newer_instance_takes_over_the_status_file(folder: Path) -> None:
    state, kubelet = f"{folder}/state", Kubelet(folder / "one")
    with PluginServer(folder / "one", state_dir=state) as before:
        kubelet.wait_until(lambda: "no device" in probe(folder), "the first one serves")
        second = StatusFile(state)
        second.set(AMD, "")
        assert "no device" in probe(folder)
        assert before.stop() == 0
    second.keep()
    assert probe(folder) == ""
    second.set(AMD, "x" * 10_000)
    assert len(probe(folder)) < 1000


def test_without_a_state_folder_no_status_is_written(folder: Path) -> None:
    file = StatusFile("")
    file.set(AMD, "")
    file.keep()
    assert [*folder.iterdir()] == []

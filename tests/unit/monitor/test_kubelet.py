"""The kubelet's record of allocations, with the init containers that PodResources lacks."""

import json
from pathlib import Path
from typing import Any

import pytest

from gpuhook.base.config.model import Config
from gpuhook.cluster.commands.nri import _gate
from gpuhook.monitor import kubelet

# Entries as the kubelet of Kubernetes 1.36 writes them, without the plugin's responses.
ENTRIES = [
    {"PodUID": "u1", "ContainerName": "first", "ResourceName": "nvidia.com/gpu",
     "DeviceIDs": {"0": ["GPU-1"], "1": ["GPU-2"]}},
    {"PodUID": "u1", "ContainerName": "first", "ResourceName": "amd.com/gpu",
     "DeviceIDs": {"-1": ["7"]}},
    {"PodUID": "u1", "ContainerName": "main", "ResourceName": "nvidia.com/gpu",
     "DeviceIDs": {"-1": ["GPU-1"]}},
    {"PodUID": "u2", "ContainerName": "first", "ResourceName": "nvidia.com/gpu",
     "DeviceIDs": {"-1": ["GPU-3"]}},
]  # fmt: skip
FIRST = [("nvidia.com/gpu", "GPU-1"), ("nvidia.com/gpu", "GPU-2"), ("amd.com/gpu", "7")]


@pytest.fixture
def socket(tmp_path: Path) -> str:
    """The path of the PodResources socket in a kubelet's folder that has a record."""
    (tmp_path / "device-plugins").mkdir()
    write(tmp_path, json.dumps({"Data": {"PodDeviceEntries": ENTRIES}, "Checksum": 1}))
    return str(tmp_path / "pod-resources/kubelet.sock")


def write(folder: Path, text: str) -> None:
    (folder / "device-plugins/kubelet_internal_checkpoint").write_text(text)


def test_a_containers_devices(socket: str) -> None:
    assert kubelet.checkpointed(socket, "u1", "first") == FIRST
    assert kubelet.checkpointed(socket, "u2", "first") == [("nvidia.com/gpu", "GPU-3")]


@pytest.mark.parametrize(
    ("uid", "container"), [("u1", "other"), ("u3", "first"), ("", "first"), ("u1", "")]
)
def test_other_containers_have_none(socket: str, uid: str, container: str) -> None:
    assert kubelet.checkpointed(socket, uid, container) == []


# Before Kubernetes 1.20, the device ids weren't grouped by NUMA node.
OLD = {"PodUID": "u1", "ContainerName": "first", "ResourceName": "x", "DeviceIDs": ["GPU-1"]}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        *(json.dumps({"Data": {"PodDeviceEntries": it}}) for it in (None, [1], [OLD])),
    ],
)
def test_a_record_of_another_form_has_no_devices(socket: str, tmp_path: Path, text: str) -> None:
    write(tmp_path, text)
    assert kubelet.checkpointed(socket, "u1", "first") == []


def test_an_absent_record_has_no_devices(tmp_path: Path) -> None:
    assert kubelet.checkpointed(f"{tmp_path}/pod-resources/kubelet.sock", "u1", "first") == []


class Asking:
    """A kubelet that lists only the container main, as for a pod with an init container."""

    problem = ""

    def __init__(self, *_: object) -> None: ...

    def ask(self, *_: object, **__: object) -> dict[str, Any]:
        return {"pods": [["team", "pod", "main", [["nvidia.com/gpu", "GPU-1"]]]]}


def test_the_gate_knows_the_devices_of_init_containers(
    socket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a requesting init container is refused, and its pod never starts."""
    monkeypatch.setattr("gpuhook.monitor.telemetry.TelemetryWorker", Asking)
    given = _gate(socket, Config())
    assert given("team", "pod", "main", "u1", 1.0) == [("nvidia.com/gpu", "GPU-1")]
    assert given("team", "pod", "first", "u1", 1.0) == FIRST
    assert given("team", "pod", "first", "u9", 1.0) == []

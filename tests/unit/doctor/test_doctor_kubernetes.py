"""Who hands devices to a kubelet."""

import pytest
from fabricated import Tree, said

from gpuhook.tools.doctor import kubernetes

FOLDER = "/var/lib/kubelet/device-plugins"
OURS, NVIDIAS, REGISTRY = "gpuhook-nvidia.com-gpu.sock", "nvidia-gpu.sock", "kubelet.sock"


@pytest.mark.parametrize(
    ("sockets", "runs", "expected"),
    [
        ([], False, {}),
        ([], True, {}),
        ([REGISTRY, OURS], True, {"ok": "serves 1 resource"}),
        ([REGISTRY, NVIDIAS, OURS], True, {"warning": "registers last", "ok": "serves 1"}),
        ([REGISTRY, NVIDIAS], False, {"ok": "NVIDIA's device plugin"}),
        ([REGISTRY], True, {"warning": "has no socket"}),
        ([REGISTRY], False, {"note": "no device plugin"}),
    ],
)
def test_device_plugins(
    tree: Tree,
    sockets: list[str],
    runs: bool,
    expected: dict[str, str],
) -> None:
    for name in sockets:
        tree.write(f"{FOLDER}/{name}", "")
    if runs:
        tree.process(71, "gpuhook-server")
    found = {each.status.value: each.message for each in kubernetes.device_plugin(tree.case)}
    assert found.keys() == expected.keys()
    assert all(words in found[status] for status, words in expected.items())


def test_without_the_packages(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    tree.write(f"{FOLDER}/{REGISTRY}", "")
    [one] = kubernetes.device_plugin(tree.case)
    assert "pip install" not in one.remedy
    monkeypatch.setattr(kubernetes, "find_spec", lambda name: None)
    [one] = kubernetes.device_plugin(tree.case)
    assert "grpcio" in one.remedy
    assert said([one])["device-plugin"][0] == "note"

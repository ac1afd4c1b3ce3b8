"""The device plugin's unit from the package, which offers this machine's GPUs to a kubelet."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from booted import GPUS, call
from kubelet import Kubelet

UNIT = Path("/usr/lib/systemd/system/gpuhook-device-plugin.service")
FOLDER = Path("/var/lib/kubelet")
RESOURCE = "nvidia.com/gpu"


@pytest.fixture
def unit(installed: None) -> Iterator[str]:
    """The name of the package's unit."""
    yield UNIT.name
    call("systemctl", "disable", "--now", UNIT.name)
    shutil.rmtree(FOLDER)


def test_the_enabled_unit_offers_gpus_across_a_kubelet_restart(unit: str) -> None:
    call("systemctl", "enable", "--now", unit)  # started before the kubelet, as at boot
    with Kubelet(FOLDER / "device-plugins") as kubelet:
        kubelet.start()
        kubelet.wait_for(RESOURCE, healthy=GPUS)
        assert kubelet.admit("pod", {RESOURCE: 1})["ids"][RESOURCE]
        kubelet.restart()
        kubelet.wait_for(RESOURCE, healthy=GPUS)
    assert call("systemctl", "is-active", unit) == "active\n"
    call("systemd-analyze", "verify", UNIT)

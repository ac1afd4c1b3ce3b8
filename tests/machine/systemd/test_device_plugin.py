"""The device plugin's unit, as its page has it, hands this machine's GPUs to a kubelet."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from booted import GPUS, call
from harness.images import REPOSITORY
from kubelet import Kubelet

UNIT = Path("/etc/systemd/system/gpuhook-device-plugin.service")
FOLDER = Path("/var/lib/kubelet")
RESOURCE = "nvidia.com/gpu"


@pytest.fixture
def unit(installed: None) -> Iterator[str]:
    """Its name; the programs are the package's."""
    page = (REPOSITORY / "docs/kubernetes/device-plugin.md").read_text()
    block = re.search(rf"{UNIT}:\n\n```\n(.*?)```", page, re.DOTALL)
    assert block is not None, "the page has the unit"
    UNIT.write_text(block[1].replace("/opt/gpuhook/bin", "/usr/bin"))
    call("systemctl", "daemon-reload")
    yield UNIT.name
    call("systemctl", "disable", "--now", UNIT.name)
    UNIT.unlink()
    shutil.rmtree(FOLDER)
    call("systemctl", "daemon-reload")


def test_it_is_enabled_and_started(unit: str) -> None:
    call("systemctl", "enable", "--now", unit)  # before the kubelet, as at boot
    with Kubelet(FOLDER / "device-plugins") as kubelet:
        kubelet.start()
        kubelet.wait_for(RESOURCE, healthy=GPUS)
        assert kubelet.admit("pod", {RESOURCE: 1})["ids"][RESOURCE]
        kubelet.restart()
        kubelet.wait_for(RESOURCE, healthy=GPUS)
    assert call("systemctl", "is-active", unit) == "active\n"
    call("systemd-analyze", "verify", UNIT)

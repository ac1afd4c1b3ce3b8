"""The installer of overlays/cdi, run by podman: the plugin's unit starts before the kubelet."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from booted import CARRIED, GPUS, call
from harness.manifests import IMAGE, containers, folders_made, pod_of, podman_options
from kubelet import Kubelet

UNIT = Path("/etc/systemd/system/gpuhook-device-plugin.service")
KUBELET = Path("/etc/systemd/system/kubelet.service")
BOOT = Path("/etc/systemd/system/boot.target")
FOLDER = Path("/var/lib/kubelet")
DOCUMENTS = Path("/run/cdi")  # the plugin writes this folder
RESOURCE = "nvidia.com/gpu"
# A service that records the plugin's state at the time a kubelet is started.
STARTS = f"""\
[Service]
Type=oneshot
ExecStart=/bin/sh -c 'systemctl is-active {UNIT.name} >/run/at-the-kubelets-start || :'
"""


def apply(variant: str, *words: str) -> str:
    """Run the installer with the settings of a variant's DaemonSet; return its output."""
    rendered = (CARRIED / "manifests" / f"{variant}.yaml").read_text()
    documents = [each for each in yaml.safe_load_all(rendered) if each["kind"] == "DaemonSet"]
    [pod] = [pod for pod in map(pod_of, documents) if "installer" in containers(pod)]
    for folder in folders_made(pod):
        Path(folder).mkdir(parents=True, exist_ok=True)
    container = containers(pod)["installer"]
    # This machine may lack the cgroup controllers that these options need.
    options = [
        each
        for each in podman_options(pod, container, {})
        if not each.startswith(("--memory", "--pids-limit"))
    ]
    return call("podman", "run", "--rm", *options, IMAGE, *(words or container["args"]))


@pytest.fixture
def node(podman: tuple[str]) -> Iterator[None]:
    """A node with the installer's image; no files of a cluster are left at the end."""
    call("podman", "load", "--input", CARRIED / "node.tar")
    KUBELET.write_text(STARTS)
    BOOT.write_text(f"[Unit]\nWants={KUBELET.name} {UNIT.name}\n")
    yield
    KUBELET.unlink()
    BOOT.unlink()
    for folder in (FOLDER, DOCUMENTS):
        shutil.rmtree(folder, ignore_errors=True)
    call("systemctl", "daemon-reload")


def test_the_plugins_unit_starts_before_the_kubelet(node: None) -> None:
    assert f"started {UNIT.name}" in apply("cdi")
    with Kubelet(FOLDER / "device-plugins") as kubelet:
        kubelet.start()
        kubelet.wait_for(RESOURCE, healthy=GPUS)
        assert kubelet.admit("pod", {RESOURCE: 1})["cdi_devices"]
        hook = "/opt/gpuhook/bin/gpuhook-cdi-hook"
        assert hook in Path("/var/run/cdi/nvidia.com-gpu.yaml").read_text()
        pid = call("systemctl", "show", "--property=MainPID", UNIT.name)
        assert "started" not in apply("cdi")
        assert call("systemctl", "show", "--property=MainPID", UNIT.name) == pid

        # As at boot, both units start in one transaction: the kubelet's job waits for the
        # plugin's job.
        assert call("systemctl", "is-enabled", UNIT.name) == "enabled\n"
        call("systemctl", "stop", UNIT.name)
        call("systemctl", "start", BOOT.name)
        assert Path("/run/at-the-kubelets-start").read_text() == "active\n"
        kubelet.wait_for(RESOURCE, healthy=GPUS)
    call("systemd-analyze", "verify", UNIT)
    assert f"removed {UNIT.name}" in apply("remove", "remove", "--engine=none")
    assert not UNIT.exists()
    # An installed package of gpuhook has a unit of that name, too, but doesn't enable it.
    words = ("--property=FragmentPath", "--property=ActiveState", "--property=UnitFileState")
    left = call("systemctl", "show", *words, UNIT.name).splitlines()
    assert f"FragmentPath={UNIT}" not in left
    assert "ActiveState=inactive" in left
    assert "UnitFileState=enabled" not in left

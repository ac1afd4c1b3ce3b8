"""Device health that the kubelet sees: errors, lost GPUs, and changed MIG devices."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.installation import Installation
from harness.node import GPUS, Node, plugin_node

from gpuhook.cluster.device_plugin.settings import Sharing


@pytest.fixture
def node(workspace: Path, installation: Installation) -> Iterator[Node]:
    with plugin_node(installation, workspace) as made:
        yield made


def test_a_fatal_xid_makes_one_gpu_unhealthy_until_it_recovers(node: Node) -> None:
    driver = node.simulate("--gpus=4")
    node.start()
    node.healthy(4, 4)
    node.hears()
    node.simulate("--xid=13", "--gpu=1")
    node.simulate("--xid=94", "--gpu=2")
    node.until(lambda: node.said("XID 94"), "the application's error is said")
    assert node.unhealthy() == set()
    node.simulate("--xid=79", "--gpu=3")
    node.healthy(3, 4)
    assert node.unhealthy() == {driver.gpus[3].uuid}
    node.healthy(4, 4)  # no events for long enough, and the GPU answers
    assert node.said(f"{driver.gpus[3].uuid} is healthy again")
    assert node.stop() == 0


def test_xid_settings_of_the_administrator_are_applied(node: Node) -> None:
    node.simulate("--gpus=2")
    node.start(xids={79: "ignore", 13: "fatal"}, recovery=0.0)
    node.healthy(2, 2)
    node.hears()
    node.simulate("--xid=79", "--gpu=0")
    node.simulate("--xid=13", "--gpu=1")
    node.healthy(1, 2)
    assert not node.said("XID 79")


def test_an_xid_of_a_mig_device_makes_only_it_unhealthy(node: Node) -> None:
    node.simulate("--gpus=2", "--mig=0:3g.71gb,1g.18gb,1g.18gb")
    node.start(mig_strategy="mixed", recovery=0.0)
    small, large = "nvidia.com/mig-1g.18gb", "nvidia.com/mig-3g.71gb"
    node.healthy(2, 2, small)
    node.hears()
    device = next(iter(node.kubelet.devices(small)))
    node.simulate("--xid=48", f"--gpu={device}")
    node.healthy(1, 2, small)
    assert node.unhealthy(small) == {device}
    node.healthy(1, 1, large)
    node.simulate("--xid=48", "--gpu=0")  # an error of the whole GPU
    node.healthy(0, 2, small)
    node.healthy(0, 1, large)
    node.healthy(1, 1)


def test_a_lost_gpu_is_unhealthy_until_it_returns(node: Node) -> None:
    driver = node.simulate("--gpus=4")
    node.start()
    node.healthy(4, 4)
    node.hears()
    node.simulate("--lost=1")
    node.healthy(3, 4)
    assert node.unhealthy() == {driver.gpus[1].uuid}
    node.simulate("--xid=79", "--gpu=2")  # events of the other GPUs still arrive
    node.healthy(2, 4)
    node.healthy(3, 4)
    answers = node.kubelet.admit("pod", {GPUS: 3})
    assert driver.gpus[1].uuid not in answers["envs"]["NVIDIA_VISIBLE_DEVICES"]
    node.simulate("--found=1")
    node.healthy(4, 4)


def test_the_log_says_why_devices_are_unhealthy_until_they_are_well(node: Node) -> None:
    driver = node.simulate("--gpus=2")
    every = ", ".join(gpu.uuid for gpu in driver.gpus)
    halves = Sharing(GPUS, 2, GPUS, (), True, ("50%", "50%"))
    node.start(sharing={GPUS: halves}, device_list_strategy=("volume-mounts",))
    node.healthy(0, 4)
    why = f"{every} are unhealthy: NVIDIA's driver limits memory since release 615"
    node.until(lambda: node.said(why), "the reason is said")
    node.simulate("--gpus=2", "--driver-version=615.10.01")
    node.healthy(4, 4)
    node.until(lambda: node.said(f"{every} are healthy again"), "and when they are well")
    assert node.log.read_text().count("unhealthy") == 1


def test_the_log_names_the_reason_for_unhealthy_mps_devices(node: Node) -> None:
    driver = node.simulate("--gpus=2")
    node.start(sharing={GPUS: Sharing(GPUS, 4, GPUS, (25,) * 4)})
    node.healthy(0, 8)
    every = ", ".join(gpu.uuid for gpu in driver.gpus)
    why = f"{every} are unhealthy: MPS' control daemon isn't running on this node"
    node.until(lambda: node.said(why), "the reason is said")
    assert node.log.read_text().count("unhealthy") == 1


def test_a_driver_without_events_is_logged_once_and_not_kept_open(node: Node) -> None:
    driver = node.simulate("--gpus=2")
    (driver.root / "simulate/no-events").touch()
    node.start()
    node.healthy(2, 2)
    why = "; ".join(f"{gpu.uuid}: Not Supported" for gpu in driver.gpus)
    said = f"These devices aren't watched for errors: {why}"
    node.until(lambda: node.said(said), "it is told")
    child = node.child("gpuhook-events")
    open_files = [os.readlink(each) for each in Path(f"/proc/{child}/fd").iterdir()]
    assert not [each for each in open_files if "nvidia" in each or "inotify" in each]
    assert node.stop() == 0
    assert node.log.read_text().count("Not Supported") == 2  # one line names both GPUs


def test_a_gpu_lost_before_the_start_is_unhealthy(node: Node) -> None:
    driver = node.simulate("--gpus=4", "--lost=1")
    node.start()
    node.healthy(3, 4)
    assert node.unhealthy() == {driver.gpus[1].uuid}


def test_nvlinked_gpus_are_preferred_together(node: Node) -> None:
    """NVLinks are read once, and a lost GPU doesn't affect what is known of the others."""
    driver = node.simulate("--gpus=6", "--nvlink=pairs", "--lost=5")
    node.start()
    node.healthy(5, 6)
    ids = [gpu.uuid for gpu in driver.gpus]
    available = [ids[4], ids[3], ids[1], ids[2]]
    assert {*node.kubelet.preferred(GPUS, available, [], 2)} == {ids[2], ids[3]}
    assert {*node.kubelet.preferred(GPUS, ids[:5], [ids[1]], 2)} == {ids[0], ids[1]}


def test_changed_mig_devices_are_offered_without_a_restart(node: Node) -> None:
    node.simulate("--gpus=2", "--mig=0:3g.71gb,1g.18gb")
    node.start(mig_strategy="mixed")
    node.healthy(1, 1, "nvidia.com/mig-3g.71gb")
    server, pid = node.child("gpuhook-server"), node.pid
    node.simulate("--mig=0:1g.18gb,1g.18gb")
    node.healthy(2, 2, "nvidia.com/mig-1g.18gb")
    node.healthy(0, 0, "nvidia.com/mig-3g.71gb")
    node.simulate("--mig=0:off")
    node.healthy(2, 2)
    node.healthy(0, 0, "nvidia.com/mig-1g.18gb")
    assert (node.child("gpuhook-server"), node.pid) == (server, pid)


def test_an_error_of_one_of_many_mig_devices_affects_only_that_one(node: Node) -> None:
    every = [f"--mig={gpu}:" + ",".join(["1g.18gb"] * 7) for gpu in range(16)]
    node.simulate("--gpus=16", *every)
    node.start(mig_strategy="single", recovery=0.0)
    node.healthy(112, 112)
    node.hears()
    first, *_ = ids = sorted(node.kubelet.devices(GPUS))
    node.simulate("--xid=48", f"--gpu={first}")
    node.healthy(111, 112)
    assert node.unhealthy() == {first}
    assert ids == sorted(node.kubelet.devices(GPUS))

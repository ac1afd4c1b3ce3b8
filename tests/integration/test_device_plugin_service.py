"""The device plugin's supervisor: its child processes, driver changes and hangs, and its costs."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.commands import run, wait_until
from harness.installation import Installation
from harness.node import Node, children, plugin_node, spent


@pytest.fixture
def node(workspace: Path, installation: Installation) -> Iterator[Node]:
    with plugin_node(installation, workspace) as made:
        yield made


def test_a_killed_server_is_replaced(node: Node) -> None:
    node.simulate("--gpus=2")
    node.start()
    node.healthy(2, 2)
    os.kill(node.child("gpuhook-server"), signal.SIGKILL)
    node.healthy(0, 2)  # the kubelet's stream ended with the server
    node.healthy(2, 2)


def test_an_unloaded_driver_withdraws_gpus_until_it_is_loaded_again(node: Node) -> None:
    node.simulate("--gpus=2")
    node.start()
    node.healthy(2, 2)
    node.hears()
    node.simulate("--xid=79", "--gpu=0")
    node.healthy(1, 2)
    node.simulate("--gpus=2", "--fail=not-loaded")
    node.healthy(0, 0)
    node.until(lambda: "gpuhook-events" not in children(node.pid), "the driver is let go of")
    node.simulate("--gpus=2")
    node.healthy(2, 2)  # errors of the earlier driver don't count for a new one
    node.hears()
    node.simulate("--xid=79", "--gpu=1")
    node.healthy(1, 2)


def test_without_a_driver_the_plugin_ends_or_waits(node: Node) -> None:
    node.simulate("--gpus=1", "--fail=not-loaded")
    node.start()
    assert node.process is not None
    assert node.process.wait(30) == 1
    assert node.said("driver")
    node.run(fail_on_init_error=False)
    node.child("gpuhook-server")
    assert node.said("Waiting until there is a device")
    node.simulate("--gpus=1")
    node.healthy(1, 1)


def test_a_hung_driver_withdraws_only_its_own_gpus(node: Node, installation: Installation) -> None:
    """NVML hangs, but AMD's GPUs stay healthy."""
    other = node.folder / "amd"
    run([installation.command, "simulate", other, "--vendor=amd", "--gpus=2"]).ok()
    lines = node.config.read_text().replace(
        "[gpuhook]\n", f'[gpuhook]\nnvml-timeout = 0.5\ndriver-roots = ["amd={other}"]\n'
    )
    node.config.write_text(lines)
    node.simulate("--gpus=2")
    node.start()
    node.healthy(2, 2)
    node.healthy(2, 2, "amd.com/gpu")
    node.simulate("--gpus=2", "--init-seconds=3600")
    node.healthy(0, 2)
    assert node.said("didn't answer within 0.5 seconds")
    node.healthy(2, 2, "amd.com/gpu")
    answers = node.kubelet.admit("pod", {"amd.com/gpu": 2})
    assert answers["envs"]
    node.simulate("--gpus=2")
    node.healthy(2, 2)
    run(["rm", "-rf", other]).ok()


def test_sighup_closes_the_driver(node: Node) -> None:
    node.simulate("--gpus=1")
    node.start()
    node.healthy(1, 1)
    node.hears()
    os.kill(node.pid, signal.SIGHUP)
    node.until(lambda: "gpuhook-events" not in children(node.pid), "NVML is let go of")
    node.healthy(1, 1)


def test_child_processes_end_with_the_plugin(node: Node) -> None:
    node.simulate("--gpus=1")
    node.start()
    node.healthy(1, 1)
    pids = [node.child("gpuhook-events"), node.child("gpuhook-server")]
    os.kill(node.pid, signal.SIGKILL)
    wait_until(lambda: not any(Path(f"/proc/{pid}/cmdline").exists() for pid in pids), "they end")


def test_cdi_specs_exist_and_are_current(node: Node) -> None:
    node.simulate("--gpus=2", "--mig=0:3g.71gb")
    folder = node.folder / "cdi"
    path = folder / "nvidia.com-gpu.yaml"
    node.start(device_list_strategy=("cdi-cri",), cdi_folder=str(folder), mig_strategy="mixed")
    node.healthy(1, 1, "nvidia.com/mig-3g.71gb")
    [name] = node.kubelet.admit("pod", {"nvidia.com/mig-3g.71gb": 1})["cdi_devices"]
    assert name.removeprefix("nvidia.com/gpu=") in path.read_text()
    node.simulate("--mig=0:1g.18gb")
    node.healthy(1, 1, "nvidia.com/mig-1g.18gb")
    [new] = node.kubelet.admit("another", {"nvidia.com/mig-1g.18gb": 1})["cdi_devices"]
    assert new.removeprefix("nvidia.com/gpu=") in path.read_text()
    assert name.removeprefix("nvidia.com/gpu=") not in path.read_text()
    node.simulate("--gpus=2", "--fail=not-loaded")
    node.until(lambda: not path.exists(), "the document goes with its driver")


def test_an_idle_plugin_uses_little_memory_and_processor_time(node: Node) -> None:
    node.simulate("--gpus=8")
    node.start(interval=30.0)
    node.healthy(8, 8)
    node.hears()
    pids = [node.pid, *children(node.pid).values()]
    rollups = [Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in pids]
    lines = [line.split() for text in rollups for line in text.splitlines()]
    assert sum(int(words[1]) for words in lines if words[0] == "Pss:") < 60 << 10
    before, began = sum(map(spent, pids)), time.monotonic()
    time.sleep(5.0)
    used = sum(map(spent, pids)) - before
    # 0.2 % of a core over a minute are 120 ms; a busy loop would be 5000 ms here.
    assert used / (time.monotonic() - began) < 0.02

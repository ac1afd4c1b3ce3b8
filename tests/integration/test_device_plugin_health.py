"""What becomes of devices at the kubelet: errors, lost GPUs, MIG changes, drivers that fail."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness.commands import run, stop, wait_until
from harness.driver import Driver, simulate
from harness.installation import Installation, write_config
from kubelet import Kubelet

from gpuhook.kubernetes.settings import Settings

GPUS = "nvidia.com/gpu"
_CODE = """
import sys
from gpuhook.config import load
from gpuhook.kubernetes import service
from gpuhook.kubernetes.settings import Settings
sys.exit(service.run(eval(sys.argv[2]), load(sys.argv[1])))
"""


def children(pid: int) -> dict[str, int]:
    """Return a process' children by what they are called."""
    found = {}
    for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        found[Path(f"/proc/{each}/comm").read_text().strip()] = int(each)
    return found


class Node:
    """A machine with a simulated driver, the plugin and a kubelet."""

    def __init__(self, installation: Installation, folder: Path) -> None:
        self.folder = folder
        self.root = folder / "driver"
        self.log = folder / "log"
        self.config = write_config(folder / "config", self.root, ["runc"])
        self.kubelet = Kubelet(folder / "kubelet")
        self._installation = installation
        self._settings = Settings()
        self.process: subprocess.Popen[bytes] | None = None

    def simulate(self, *options: str) -> Driver:
        return simulate(self._installation, self.root, *options)

    def start(self, **options: object) -> None:
        """Start kubelet and plugin."""
        self.kubelet.start()
        self.run(**options)

    def run(self, **options: object) -> None:
        """Start the plugin."""
        chosen = {"interval": 0.5, "recovery": 2.0, **options}
        settings = Settings(kubelet_folder=str(self.kubelet.folder), **chosen)  # type: ignore[arg-type]
        argv = [sys.executable, "-c", _CODE, str(self.config), repr(settings)]
        env = {**os.environ, "PATH": f"{self._installation.bin}:{os.environ['PATH']}"}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(argv, stdout=log, stderr=log, env=env)

    def stop(self) -> int:
        """Have the plugin end; return its exit status."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)

    def child(self, name: str) -> int:
        assert self.process is not None
        wait_until(lambda: name in children(self.pid), f"there is a {name}")
        return children(self.pid)[name]

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def said(self, words: str) -> bool:
        return words in self.log.read_text()

    def until(self, condition: Callable[[], bool], what: str) -> None:
        try:
            wait_until(condition, what)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log.read_text()}") from None

    def healthy(self, count: int, of: int, resource: str = GPUS) -> None:
        """Wait until that many of a resource's devices can be had."""
        kubelet = self.kubelet
        self.until(
            lambda: (
                resource in kubelet.resources()
                and (kubelet.allocatable(resource), kubelet.capacity(resource)) == (count, of)
            ),
            f"{count} of {of} {resource} are healthy",
        )

    def unhealthy(self, resource: str = GPUS) -> set[str]:
        devices = self.kubelet.devices(resource)
        return {name for name, device in devices.items() if not device.healthy}

    def end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            stop(self.process)
        self.kubelet.stop()


@pytest.fixture
def node(workspace: Path, installation: Installation) -> Iterator[Node]:
    with tempfile.TemporaryDirectory(prefix="node-", dir=workspace) as folder:
        made = Node(installation, Path(folder))
        yield made
        made.end()
        run(["rm", "-rf", made.root]).ok()


def test_an_xid_is_about_one_gpu(node: Node) -> None:
    driver = node.simulate("--gpus=4")
    node.start()
    node.healthy(4, 4)
    node.child("gpuhook-events")
    node.simulate("--xid=13", "--gpu=1")
    node.simulate("--xid=94", "--gpu=2")
    node.until(lambda: node.said("XID 94"), "the application's error is said")
    assert node.unhealthy() == set()
    node.simulate("--xid=79", "--gpu=3")
    node.healthy(3, 4)
    assert node.unhealthy() == {driver.gpus[3].uuid}
    node.healthy(4, 4)  # quiet for long enough, and it answers
    assert node.said(f"{driver.gpus[3].uuid} is healthy again")
    assert node.stop() == 0


def test_what_an_administrator_sets_counts(node: Node) -> None:
    node.simulate("--gpus=2")
    node.start(xids={79: "ignore", 13: "fatal"}, recovery=0.0)
    node.healthy(2, 2)
    node.child("gpuhook-events")
    node.simulate("--xid=79", "--gpu=0")
    node.simulate("--xid=13", "--gpu=1")
    node.healthy(1, 2)
    assert not node.said("XID 79")


def test_an_xid_is_about_one_instance(node: Node) -> None:
    node.simulate("--gpus=2", "--mig=0:3g.71gb,1g.18gb,1g.18gb")
    node.start(mig_strategy="mixed", recovery=0.0)
    small, large = "nvidia.com/mig-1g.18gb", "nvidia.com/mig-3g.71gb"
    node.healthy(2, 2, small)
    node.child("gpuhook-events")
    device = next(iter(node.kubelet.devices(small)))
    node.simulate("--xid=48", f"--gpu={device}")
    node.healthy(1, 2, small)
    assert node.unhealthy(small) == {device}
    node.healthy(1, 1, large)
    node.simulate("--xid=48", "--gpu=0")  # of the whole GPU
    node.healthy(0, 2, small)
    node.healthy(0, 1, large)
    node.healthy(1, 1)


def test_one_lost_gpu_is_left_out_and_comes_back(node: Node) -> None:
    driver = node.simulate("--gpus=4")
    node.start()
    node.healthy(4, 4)
    node.child("gpuhook-events")
    node.simulate("--lost=1")
    node.healthy(3, 4)
    assert node.unhealthy() == {driver.gpus[1].uuid}
    node.simulate("--xid=79", "--gpu=2")  # the others are listened to all the same
    node.healthy(2, 4)
    node.healthy(3, 4)
    answers = node.kubelet.admit("pod", {GPUS: 3})
    assert driver.gpus[1].uuid not in answers["envs"]["NVIDIA_VISIBLE_DEVICES"]
    node.simulate("--found=1")
    node.healthy(4, 4)


def test_a_gpu_that_was_lost_before(node: Node) -> None:
    driver = node.simulate("--gpus=4", "--lost=1")
    node.start()
    node.healthy(3, 4)
    assert node.unhealthy() == {driver.gpus[1].uuid}


def test_mig_devices_change_while_it_runs(node: Node) -> None:
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


def test_many_mig_devices(node: Node) -> None:
    every = [f"--mig={gpu}:" + ",".join(["1g.18gb"] * 7) for gpu in range(16)]
    node.simulate("--gpus=16", *every)
    node.start(mig_strategy="single", recovery=0.0)
    node.healthy(112, 112)
    node.child("gpuhook-events")
    first, *_ = ids = sorted(node.kubelet.devices(GPUS))
    node.simulate("--xid=48", f"--gpu={first}")
    node.healthy(111, 112)
    assert node.unhealthy() == {first}
    assert ids == sorted(node.kubelet.devices(GPUS))


def test_a_server_that_dies_is_started_again(node: Node) -> None:
    node.simulate("--gpus=2")
    node.start()
    node.healthy(2, 2)
    os.kill(node.child("gpuhook-server"), signal.SIGKILL)
    node.healthy(0, 2)  # the kubelet's stream has ended
    node.healthy(2, 2)


def test_a_driver_that_is_unloaded_and_loaded_again(node: Node) -> None:
    node.simulate("--gpus=2")
    node.start()
    node.healthy(2, 2)
    node.child("gpuhook-events")
    node.simulate("--xid=79", "--gpu=0")
    node.healthy(1, 2)
    node.simulate("--gpus=2", "--fail=not-loaded")
    node.healthy(0, 0)
    node.until(lambda: "gpuhook-events" not in children(node.pid), "the driver is let go of")
    node.simulate("--gpus=2")
    node.healthy(2, 2)  # a new driver has no old trouble
    node.child("gpuhook-events")
    node.simulate("--xid=79", "--gpu=1")
    node.healthy(1, 2)


def test_without_a_driver(node: Node) -> None:
    node.simulate("--gpus=1", "--fail=not-loaded")
    node.start()
    assert node.process is not None
    assert node.process.wait(30) == 1
    assert node.said("driver")
    node.run(fail_on_init_error=False)
    node.child("gpuhook-server")
    node.simulate("--gpus=1")
    node.healthy(1, 1)


def test_a_driver_that_hangs_harms_no_other(node: Node, installation: Installation) -> None:
    """NVML that doesn't answer takes NVIDIA's GPUs away, and nobody else's."""
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


def test_sighup_lets_go_of_the_driver(node: Node) -> None:
    node.simulate("--gpus=1")
    node.start()
    node.healthy(1, 1)
    node.child("gpuhook-events")
    os.kill(node.pid, signal.SIGHUP)
    node.until(lambda: "gpuhook-events" not in children(node.pid), "NVML is let go of")
    node.healthy(1, 1)


def test_children_end_with_it(node: Node) -> None:
    node.simulate("--gpus=1")
    node.start()
    node.healthy(1, 1)
    pids = [node.child("gpuhook-events"), node.child("gpuhook-server")]
    os.kill(node.pid, signal.SIGKILL)
    wait_until(lambda: not any(Path(f"/proc/{pid}/cmdline").exists() for pid in pids), "they end")


def test_documents_are_there_and_current(node: Node) -> None:
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


def test_an_idle_one_costs_next_to_nothing(node: Node) -> None:
    node.simulate("--gpus=8")
    node.start(interval=30.0)
    node.healthy(8, 8)
    node.child("gpuhook-events")
    pids = [node.pid, *children(node.pid).values()]
    rollups = [Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in pids]
    lines = [line.split() for text in rollups for line in text.splitlines()]
    assert sum(int(words[1]) for words in lines if words[0] == "Pss:") < 60 << 10
    before, began = sum(map(spent, pids)), time.monotonic()
    time.sleep(5.0)
    used = sum(map(spent, pids)) - before
    # 0.2 % of a core over a minute are 120 ms; a busy loop would be 5000 ms here.
    assert used / (time.monotonic() - began) < 0.02


def spent(pid: int) -> float:
    """Return the processor time that a process has used, in seconds."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9

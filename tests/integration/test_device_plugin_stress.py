"""The device plugin's server over a long run: it loses no update and doesn't grow."""

import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from kubelet import AdmissionError, Kubelet
from plugin_server import PluginServer, gpus

GPU, AMD = "nvidia.com/gpu", "amd.com/gpu"
RESTARTS, CHANGES, BREAKS = 200, 10_000, 50
GROWTH_KIB = 1024  # from the middle of a run to its end; a leak of 6 KiB per restart exceeds it


@pytest.fixture
def kubelet() -> Iterator[Kubelet]:
    """A running kubelet in a folder with a short path."""
    with tempfile.TemporaryDirectory(prefix="gk") as top, Kubelet(Path(top) / "dp") as running:
        running.start()
        yield running


@pytest.fixture
def server(kubelet: Kubelet) -> Iterator[PluginServer]:
    with PluginServer(kubelet.folder) as running:
        running.report(gpus(), gpus(2, name=AMD))
        kubelet.wait_for(GPU, healthy=8)
        kubelet.wait_for(AMD, healthy=2)
        yield running


class Size:
    """The current resources of a process, for a later comparison."""

    def __init__(self, server: PluginServer) -> None:
        self._server = server
        self.memory = server.memory()
        self.threads, self.descriptors = server.threads(), server.descriptors()

    def check(self) -> None:
        """Fail if the process has grown since then."""
        assert self._server.memory() - self.memory < GROWTH_KIB
        # A connection that has just ended or started may add a few descriptors.
        assert abs(self._server.descriptors() - self.descriptors) <= 4
        assert self._server.threads() <= self.threads + 2


def wait_for_lost(kubelet: Kubelet, gpu: int) -> None:
    """Wait until only this GPU is unhealthy, in one check: a resource may register twice."""

    def is_lost() -> bool:
        devices = kubelet.devices(GPU).values()
        return [each.id for each in devices if not each.healthy] == [f"GPU-{gpu}"]

    kubelet.wait_until(is_lost, f"GPU-{gpu} is broken")


def test_kubelet_restarts_lose_no_device_and_no_memory(
    kubelet: Kubelet, server: PluginServer
) -> None:
    size = None
    for number in range(RESTARTS):
        if number == RESTARTS // 2:
            size = Size(server)
        kubelet.restart()
        lost = frozenset({number % 8})
        server.report(gpus(lost=lost), gpus(2, name=AMD))
        kubelet.wait_for(GPU, healthy=7, capacity=8)
        kubelet.wait_for(AMD, healthy=2)
        wait_for_lost(kubelet, number % 8)
    assert size is not None
    size.check()


def test_frequent_health_changes_reach_the_kubelet_without_growth(
    kubelet: Kubelet, server: PluginServer
) -> None:
    chance = random.Random(7)  # noqa: S311 - faults, no secret
    size, lost = None, frozenset[int]()
    for number in range(CHANGES):
        if number == CHANGES // 2:
            size = Size(server)
        lost = frozenset(each for each in range(8) if chance.random() < 0.3)
        server.report(gpus(lost=lost), gpus(2, name=AMD))
        if number % 50 == 0:
            kubelet.wait_for(GPU, healthy=8 - len(lost), capacity=8)
    final = {f"GPU-{number}": number not in lost for number in range(8)}

    def is_final() -> bool:
        return {each.id: each.healthy for each in kubelet.devices(GPU).values()} == final

    kubelet.wait_until(is_final, "the newest list")
    assert len(kubelet.registrations) == 2
    assert size is not None
    size.check()


def test_broken_streams_lose_no_device_and_no_memory(
    kubelet: Kubelet, server: PluginServer
) -> None:
    chance = random.Random(11)  # noqa: S311 - faults, no secret
    size = None
    for number in range(BREAKS):
        if number == BREAKS // 2:
            size = Size(server)
        lost = frozenset({chance.randrange(8)})
        server.report(gpus(lost=lost), gpus(2, name=AMD))
        time.sleep(chance.random() * 0.01)
        action = chance.randrange(3)
        if action == 0:
            kubelet.break_stream(GPU)
        elif action == 1:
            (kubelet.folder / "gpuhook-nvidia.com_gpu.sock").unlink(missing_ok=True)
        else:
            kubelet.restart()
        try:
            kubelet.admit("pod", {GPU: 1})
            kubelet.remove("pod")
        except (AdmissionError, grpc.RpcError):
            pass  # a pod that comes at such a moment also fails
        kubelet.wait_for(AMD, healthy=2)
        kubelet.wait_for(GPU, healthy=7, capacity=8)
    assert size is not None
    size.check()


def test_many_devices_in_eight_resources_are_allocated(
    kubelet: Kubelet, server: PluginServer
) -> None:
    """One node has 112 MIG devices, in replicas of 4, as eight resources."""
    names = [f"nvidia.com/mig-{number}g.10gb" for number in range(1, 9)]
    server.report(*(gpus(14, name=name, replicas=4) for name in names))
    for name in names:
        kubelet.wait_for(name, healthy=56)
    chosen = kubelet.admit("pod", dict.fromkeys(names, 2))
    assert all(len(chosen["ids"][name]) == 2 for name in names)


def test_an_idle_server_uses_little_memory_and_processor_time(
    kubelet: Kubelet, server: PluginServer
) -> None:
    server.report(*(gpus(name=f"{GPU}{number}") for number in range(4)))
    kubelet.wait_for(f"{GPU}3", healthy=8)
    time.sleep(1)
    before = server.processor_time()
    time.sleep(5)
    # In seconds. On a quiet host, 0.2 % of a core would be 10 ms; a busy loop would be 5 s.
    assert server.processor_time() - before < 0.1
    assert server.memory() < 32 << 10  # KiB

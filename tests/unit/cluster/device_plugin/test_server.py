"""The device plugin's server as a process, with a kubelet that behaves like a real one."""

import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import grpc
import kubelet as nodes
import pytest
import wire
from kubelet import Kubelet
from plugin_server import PluginServer, gpus, units

GPU, AMD = "nvidia.com/gpu", "amd.com/gpu"
SOCKET = "gpuhook-nvidia.com_gpu.sock"
LOCAL = (("grpc.use_local_subchannel_pool", 1), ("grpc.default_authority", "localhost"))


@pytest.fixture
def folder() -> Iterator[Path]:
    """The path of the kubelet's folder, which doesn't exist yet.

    The path is short because a socket's path has a length limit.
    """
    with tempfile.TemporaryDirectory(prefix="gk") as top:
        yield Path(top) / "dp"


@pytest.fixture
def kubelet(folder: Path) -> Iterator[Kubelet]:
    """A kubelet that isn't started yet."""
    with_folder = Kubelet(folder)
    try:
        yield with_folder
    finally:
        with_folder.stop()


@pytest.fixture
def server(folder: Path) -> Iterator[PluginServer]:
    with PluginServer(folder) as running:
        yield running


@pytest.fixture
def registered(kubelet: Kubelet, server: PluginServer) -> Kubelet:
    """A kubelet with eight GPUs that the server reports."""
    kubelet.start()
    server.report(gpus())
    kubelet.wait_for(GPU, healthy=8)
    return kubelet


# Registration ------------------------------------------------------------------------------


def test_the_plugin_registers_with_version_socket_and_resource(
    registered: Kubelet, folder: Path
) -> None:
    [request] = registered.registrations
    assert (request.version, request.endpoint, request.resource) == ("v1beta1", SOCKET, GPU)
    assert request.prefers
    mode = (folder / SOCKET).lstat().st_mode
    assert stat.S_ISSOCK(mode)
    assert not mode & 0o077


def test_device_plugin_options_equal_those_of_the_registration(registered: Kubelet) -> None:
    options = registered.call(GPU, "GetDevicePluginOptions", b"")
    assert wire.fields(options) == {2: 1}


def test_changed_devices_are_sent_without_a_new_registration(
    registered: Kubelet, server: PluginServer
) -> None:
    assert registered.devices(GPU)["GPU-3"] == nodes.Device("GPU-3", healthy=True, numa=(1,))
    server.report(gpus(lost=frozenset({3, 5})))
    registered.wait_for(GPU, healthy=6, capacity=8)
    assert not registered.devices(GPU)["GPU-5"].healthy
    server.report(gpus(count=4))
    registered.wait_for(GPU, healthy=4, capacity=4)
    assert len(registered.registrations) == 1


def test_same_list_is_not_sent_again(registered: Kubelet, server: PluginServer) -> None:
    for _ in range(5):
        server.report(gpus())
    server.report(gpus(lost=frozenset({1})))
    registered.wait_for(GPU, healthy=7)
    assert registered.messages == 2


def test_the_newest_reported_state_is_sent(registered: Kubelet, server: PluginServer) -> None:
    for number in range(300):
        server.report(gpus(lost=frozenset({number % 8})))
    server.report(gpus(lost=frozenset({0, 1, 2})))
    registered.wait_for(GPU, healthy=5)


def test_a_late_kubelet_gets_a_registration(
    kubelet: Kubelet, server: PluginServer, folder: Path
) -> None:
    server.report(gpus())
    server.wait_for_line(GPU, str(folder), "isn't there")
    folder.mkdir()
    server.wait_for_line(GPU, "kubelet.sock isn't there")
    kubelet.start()
    kubelet.wait_for(GPU, healthy=8)


def test_a_dead_kubelet_socket_is_reported_and_retried(
    kubelet: Kubelet, server: PluginServer, folder: Path
) -> None:
    folder.mkdir()
    with nodes.dead_socket(folder / nodes.REGISTRY):
        server.report(gpus())
        server.wait_for_line(GPU, "No kubelet answers")
        kubelet.start()
        kubelet.wait_for(GPU, healthy=8)


def test_a_kubelet_that_listens_later_gets_a_registration(
    kubelet: Kubelet, server: PluginServer, folder: Path
) -> None:
    """A socket exists after bind, and no event reports the later listen."""
    kubelet.start()
    relay = socket.socket(socket.AF_UNIX)
    (folder / nodes.REGISTRY).unlink()
    with relay, socket.socket(socket.AF_UNIX) as behind:
        relay.bind(str(folder / nodes.REGISTRY))
        server.report(gpus())
        server.wait_for_line(GPU, "No kubelet answers")
        relay.listen()
        relay.settimeout(nodes.PATIENCE_S)
        front, _ = relay.accept()
        behind.connect(str(kubelet.folder.with_name(f"{folder.name}.live")))
        with front, nodes.relayed(front, behind):
            kubelet.wait_for(GPU, healthy=8)


def test_an_unregistered_server_serves_its_socket_and_makes_it_again(
    kubelet: Kubelet, folder: Path
) -> None:
    """Tests use an empty --kubelet-socket for this."""
    kubelet.start()
    with PluginServer(folder, register=False) as server:
        server.report(gpus())
        for times in (1, 2):
            server.wait_for_line(GPU, "not registered", times=times)
            with grpc.insecure_channel(f"unix:{folder}/{SOCKET}", options=LOCAL) as channel:
                method = channel.unary_unary("/v1beta1.DevicePlugin/GetDevicePluginOptions")
                assert wire.fields(method(b"", timeout=10)) == {2: 1}
            (folder / SOCKET).unlink()
    assert kubelet.registrations == []


def test_a_refused_registration_is_reported_once_and_retried(
    kubelet: Kubelet, server: PluginServer
) -> None:
    kubelet.refuse = "not today"
    kubelet.start()
    server.report(gpus())
    kubelet.wait_until(lambda: len(kubelet.registrations) > 4, "five attempts")
    moments = [each.moment for each in kubelet.registrations]
    pauses = [after - before for before, after in pairwise(moments)]
    assert pauses[3] > 2 * pauses[0]
    assert sum("not today" in line for line in server.lines) == 1
    kubelet.refuse = ""
    kubelet.wait_for(GPU, healthy=8)


def test_an_unsupported_kubelet_version_is_reported(kubelet: Kubelet, server: PluginServer) -> None:
    kubelet.version = "v2"
    kubelet.start()
    server.report(gpus())
    server.wait_for_line(GPU, "refuses", "version")


def test_a_slow_kubelet_gets_one_registration(kubelet: Kubelet, server: PluginServer) -> None:
    kubelet.delay = 3.0
    kubelet.start()
    server.report(gpus())
    kubelet.wait_for(GPU, healthy=8)
    assert len(kubelet.registrations) == 1


# What ends a registration ------------------------------------------------------------------


def test_a_restarted_kubelet_gets_the_current_devices(
    registered: Kubelet, server: PluginServer
) -> None:
    registered.stop()
    server.report(gpus(lost=frozenset({7})))
    server.wait_for_line("No kubelet answers")
    registered.start()
    registered.wait_for(GPU, healthy=7, capacity=8)


def test_a_new_kubelet_gets_a_registration_without_delay(
    kubelet: Kubelet, server: PluginServer
) -> None:
    kubelet.refuse = "no"
    kubelet.start()
    server.report(gpus())
    kubelet.wait_until(lambda: len(kubelet.registrations) == 6, "six attempts")
    kubelet.refuse = ""
    kubelet.restart()
    kubelet.wait_for(GPU, healthy=8)
    last, first = kubelet.registrations[-2:]
    assert first.moment - last.moment < 2.5  # the pause would have been 3.2 seconds


def test_restarts_of_the_kubelet_are_noticed_without_inotify(
    kubelet: Kubelet, folder: Path
) -> None:
    kubelet.start()
    with PluginServer(folder, inotify=False) as server:
        server.report(gpus())
        kubelet.wait_for(GPU, healthy=8)
        (folder / SOCKET).unlink()
        kubelet.wait_until(lambda: len(kubelet.registrations) == 2, "registered again")
        kubelet.restart()
        kubelet.wait_for(GPU, healthy=8)


def test_a_broken_stream_causes_a_new_registration(
    registered: Kubelet, server: PluginServer
) -> None:
    registered.break_stream(GPU)
    assert (registered.capacity(GPU), registered.allocatable(GPU)) == (8, 0)
    registered.wait_for(GPU, healthy=8)
    assert len(registered.registrations) == 2
    server.report(gpus(lost=frozenset({1})))
    registered.wait_for(GPU, healthy=7)


def test_a_removed_plugin_socket_is_made_and_registered_again(
    registered: Kubelet, folder: Path
) -> None:
    (folder / SOCKET).unlink()
    registered.wait_until(lambda: len(registered.registrations) == 2, "registered again")
    registered.wait_for(GPU, healthy=8)
    assert (folder / SOCKET).is_socket()


def test_a_socket_removed_during_registration_is_registered_again(
    kubelet: Kubelet, server: PluginServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kubelet waits for a socket that it has removed itself: here, longer than the test."""
    monkeypatch.setattr(nodes, "DIAL_S", 2 * nodes.PATIENCE_S)
    kubelet.delay = 1.0
    kubelet.start()
    server.report(gpus())
    kubelet.wait_until(lambda: bool(kubelet.registrations), "it registers")
    (folder / SOCKET).unlink()
    # Whatever a kubelet does, the registration call itself ends only after 15 seconds.
    kubelet.wait_until(lambda: len(kubelet.registrations) == 2, "registered again", seconds=13)
    kubelet.wait_for(GPU, healthy=8)


# A starting kubelet removes the sockets at the moment when the plugin has just made its own.
REMOVED_AT_ONCE = """
import os
removed = []
identity = folder.identity
def gone(path):
    if "gpuhook-" in path and not removed and os.path.lexists(path):
        removed.append(path)
        os.unlink(path)
    return identity(path)
folder.identity = gone
"""


def test_a_socket_removed_at_once_is_made_again(kubelet: Kubelet, folder: Path) -> None:
    kubelet.start()
    with PluginServer(folder, first=REMOVED_AT_ONCE) as server:
        server.report(gpus())
        kubelet.wait_for(GPU, healthy=8)


def test_a_replaced_kubelet_socket_causes_a_new_registration(
    registered: Kubelet, folder: Path
) -> None:
    live = folder.with_name(f"{folder.name}.live")
    (folder / nodes.REGISTRY).unlink()
    os.link(live, folder / nodes.REGISTRY)
    registered.wait_until(lambda: len(registered.registrations) == 2, "registered again")
    registered.wait_for(GPU, healthy=8)


def test_a_removed_plugin_folder_is_watched_again_when_recreated(
    registered: Kubelet, server: PluginServer, folder: Path
) -> None:
    registered.stop()
    shutil.rmtree(folder)
    server.wait_for_line("folder", "isn't there")
    registered.start()
    registered.wait_for(GPU, healthy=8)
    # The new folder is watched as the old one was.
    registered.restart()
    registered.wait_for(GPU, healthy=8)


# Resources that come and go ----------------------------------------------------------------


def test_an_added_resource_does_not_affect_the_others(
    registered: Kubelet, server: PluginServer
) -> None:
    server.report(gpus(), gpus(2, name=AMD))
    registered.wait_for(AMD, healthy=2)
    assert [each.resource for each in registered.registrations] == [GPU, AMD]
    assert registered.messages == 2
    registered.restart()
    for name, count in ((GPU, 8), (AMD, 2)):
        registered.wait_for(name, healthy=count)


def test_a_removed_resource_sends_an_empty_list_before_it_ends(
    registered: Kubelet, server: PluginServer, folder: Path
) -> None:
    server.report(gpus(), gpus(2, name=AMD))
    registered.wait_for(AMD, healthy=2)
    server.report(gpus(2, name=AMD))
    registered.wait_until(lambda: not (folder / SOCKET).exists(), "the socket is removed")
    registered.wait_until(lambda: bool(registered.endpoint(GPU).ended), "the stream has ended")
    assert registered.endpoint(GPU).ended == "OK"
    assert registered.capacity(GPU) == 0
    assert registered.allocatable(AMD) == 2
    assert len(registered.registrations) == 2
    server.report(gpus(4), gpus(2, name=AMD))
    registered.wait_for(GPU, healthy=4)


def test_a_resource_removed_and_added_at_once_is_served(
    registered: Kubelet, server: PluginServer
) -> None:
    for _ in range(20):
        server.report()
        server.report(gpus())
    server.report()
    server.report(gpus(3))
    registered.wait_for(GPU, healthy=3)


def test_a_resource_that_cannot_be_served_does_not_affect_others(
    kubelet: Kubelet, server: PluginServer, folder: Path
) -> None:
    kubelet.start()
    (folder / SOCKET).write_text("somebody's")
    long, odd = f"a.b/{'c' * 90}", "a.b/../c"
    server.report(gpus(), gpus(name=long), gpus(name=odd), gpus(name=AMD))
    kubelet.wait_for(AMD, healthy=8)
    server.wait_for_line(GPU, "a socket")
    server.wait_for_line(long, "too long", "107")
    server.wait_for_line(odd, "The kubelet refuses", "is invalid")
    assert (folder / SOCKET).read_text() == "somebody's"
    (folder / SOCKET).unlink()
    kubelet.wait_for(GPU, healthy=8)


def test_an_internal_failure_affects_only_its_resource(
    registered: Kubelet, server: PluginServer
) -> None:
    """Text that can't be encoded makes the list impossible to send."""
    [unit] = units(1)
    server.report(gpus(), replace(gpus(name="b.c/d"), units=(replace(unit, id="\ud800"),)))
    server.wait_for_line("b.c/d", "a call failed", "Unicode")
    server.report(gpus(7), gpus(name="b.c/d"), gpus(name=AMD))
    registered.wait_for(GPU, healthy=7)
    for name in (AMD, "b.c/d"):
        registered.wait_for(name, healthy=8)
    assert [each.resource for each in registered.registrations].count(GPU) == 1


# What earlier processes left ----------------------------------------------------------------


def test_sockets_of_killed_servers_are_removed(
    kubelet: Kubelet, server: PluginServer, folder: Path
) -> None:
    server.report(gpus(name=AMD))
    kubelet.start()
    kubelet.wait_for(AMD, healthy=8)
    server.process.kill()
    server.process.wait()
    assert (folder / "gpuhook-amd.com_gpu.sock").is_socket()
    strange = folder / "nvidia-gpu.sock"
    plain = folder / "gpuhook-x.sock"
    plain.write_text("")
    with nodes.dead_socket(strange), PluginServer(folder) as new:
        new.report(gpus())
        kubelet.wait_for(GPU, healthy=8)
        assert nodes.sockets(folder) == [folder / SOCKET, folder / nodes.REGISTRY, strange]
        assert plain.exists()


def test_a_second_server_waits_until_the_first_one_ends(
    registered: Kubelet, server: PluginServer, folder: Path
) -> None:
    with PluginServer(folder) as second:
        second.report(gpus(4))
        second.wait_for_line("Another process serves")
        assert registered.allocatable(GPU) == 8
        assert len(registered.registrations) == 1
        assert server.stop() == 0
        registered.wait_for(GPU, healthy=4)


# Answers -----------------------------------------------------------------------------------


def test_allocation_gives_distinct_devices_until_none_is_left(
    registered: Kubelet, server: PluginServer
) -> None:
    answers = registered.admit("pod", {GPU: 2})
    assert set(answers["envs"]["NVIDIA_VISIBLE_DEVICES"].split(",")) == set(answers["ids"][GPU])
    assert [method for method, *_ in registered.calls] == ["GetPreferredAllocation", "Allocate"]
    server.wait_for_line(GPU, "2 devices for a container", *answers["ids"][GPU])
    others = registered.admit("other", {GPU: 6})
    assert not set(others["ids"][GPU]) & set(answers["ids"][GPU])
    with pytest.raises(nodes.AdmissionError, match="Requested: 1, Available: 0"):
        registered.admit("third", {GPU: 1})


def test_running_pods_keep_their_devices_after_a_kubelet_restart(registered: Kubelet) -> None:
    answers = registered.admit("pod", {GPU: 2})
    calls = len(registered.calls)
    registered.restart()
    registered.wait_for(GPU, healthy=8)
    assert registered.admit("pod", {GPU: 2}) == answers
    assert len(registered.calls) == calls


def test_an_unknown_id_in_an_allocation_is_refused(registered: Kubelet) -> None:
    request = wire.message((1, wire.message((1, "GPU-0"), (1, "GPU-77"))))
    with pytest.raises(grpc.RpcError, match="no device 'GPU-77'") as caught:
        registered.call(GPU, "Allocate", request)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_allocations_for_several_or_no_containers_are_answered(registered: Kubelet) -> None:
    containers = [wire.message((1, f"GPU-{number}")) for number in range(8)]
    text = registered.call(GPU, "Allocate", wire.message(*((1, each) for each in containers)))
    found = [wire.mapping(each, 1)["NVIDIA_VISIBLE_DEVICES"] for each in wire.messages(text, 1)]
    assert found == [f"GPU-{number}" for number in range(8)]
    assert registered.call(GPU, "Allocate", b"") == b""
    assert registered.call(GPU, "GetPreferredAllocation", b"") == b""
    assert registered.call(GPU, "PreStartContainer", wire.message((1, "GPU-1"))) == b""


def test_a_preferred_allocation_includes_required_devices(registered: Kubelet) -> None:
    chosen = registered.preferred(GPU, ["GPU-5", "GPU-2", "GPU-7"], ["GPU-7"], 2)
    assert len(chosen) == 2
    assert "GPU-7" in chosen


def test_an_invalid_request_is_refused_and_the_server_continues(registered: Kubelet) -> None:
    with pytest.raises(grpc.RpcError):
        registered.call(GPU, "Allocate", b"\xff\xff\xff")
    assert registered.admit("pod", {GPU: 1})["ids"]


def test_allocation_works_while_the_kubelet_reads_no_list(
    registered: Kubelet, server: PluginServer
) -> None:
    with registered.reading_nothing():
        for number in range(60):
            server.report(gpus(count=300, lost=frozenset({number})))
        assert registered.admit("pod", {GPU: 1})["ids"]
    server.report(gpus(count=7))
    registered.wait_for(GPU, healthy=7)


# The end -----------------------------------------------------------------------------------


def test_stopping_the_server_removes_its_socket_and_keeps_capacity(
    registered: Kubelet, server: PluginServer, folder: Path
) -> None:
    began = time.monotonic()
    assert server.stop() == 0
    assert time.monotonic() - began < 4
    assert nodes.sockets(folder) == [folder / nodes.REGISTRY]
    registered.wait_until(lambda: registered.allocatable(GPU) == 0, "nothing allocatable")
    # Running pods' devices come back with the next process, so the list isn't emptied.
    assert registered.capacity(GPU) == 8


@pytest.mark.parametrize("refuses", [False, True])
def test_stopping_during_registration_is_fast(
    kubelet: Kubelet, server: PluginServer, refuses: bool
) -> None:
    kubelet.delay = 0.0 if refuses else 5.0
    kubelet.refuse = "no" if refuses else ""
    kubelet.start()
    server.report(gpus())
    kubelet.wait_until(lambda: bool(kubelet.registrations), "it registers")
    began = time.monotonic()
    assert server.stop() == 0
    assert time.monotonic() - began < 4


def test_the_server_ends_with_its_supervisor(
    registered: Kubelet, server: PluginServer, folder: Path
) -> None:
    server.hang_up()
    assert server.process.wait(nodes.PATIENCE_S) == 0
    assert nodes.sockets(folder) == [folder / nodes.REGISTRY]


def test_an_invalid_state_ends_the_server_with_an_error(
    registered: Kubelet, server: PluginServer
) -> None:
    server.send(b'{"resources": 1}\n')
    assert server.process.wait(nodes.PATIENCE_S) == 1


# The extra ---------------------------------------------------------------------------------


@pytest.mark.parametrize("package", ["grpc", "google.protobuf"])
def test_a_missing_python_package_is_reported(package: str) -> None:
    code = f"""
import sys
from gpuhook.cluster.kubelet_endpoint.supervisor import check_packages
sys.modules[{package!r}] = None
check_packages()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    last = done.stderr.splitlines()[-1]
    assert f"the module {package} is missing" in last
    assert "pip install grpcio protobuf" in last

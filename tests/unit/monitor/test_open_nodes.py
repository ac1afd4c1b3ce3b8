import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from gpuhook.monitor.containers import open_nodes
from gpuhook.monitor.host.namespaces import NamespaceScan

PATHS = {(1, 7): "/dev/gpu0", (1, 5): "/dev/gpu1"}  # the numbers of /dev/full and /dev/zero


@pytest.fixture
def started() -> Iterator[Callable[[str], int]]:
    """A function that runs Python statements in a process, which then waits, and returns its id."""
    processes = []

    def start(text: str) -> int:
        words = [sys.executable, "-c", f"import mmap, os\n{text}\nprint(flush=True)\ninput()"]
        pipe = subprocess.PIPE
        process = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"\n"
        return process.pid

    yield start
    for process in processes:
        process.communicate(b"\n", timeout=60)


def nodes_of(pid: int) -> tuple[str, ...]:
    found = open_nodes.users(PATHS, NamespaceScan(60.0), [str(pid)])
    return found[0].nodes if found else ()


@pytest.mark.parametrize("flags", ["os.O_RDONLY", "os.O_RDWR", "os.O_WRONLY"])
def test_a_process_with_an_open_node_is_found(started: Callable[[str], int], flags: str) -> None:
    pid = started(f"one = os.open('/dev/full', {flags}); two = os.open('/dev/null', os.O_RDONLY)")
    [found] = open_nodes.users(PATHS, NamespaceScan(60.0), [str(pid)])
    assert (found.pid, found.nodes) == (pid, ("/dev/gpu0",))
    assert found.command


def test_processes_with_several_open_nodes_are_found(started: Callable[[str], int]) -> None:
    text = "one, two = (os.open(path, os.O_RDONLY) for path in ('/dev/zero', '/dev/full'))"
    pids = [started(text), started("pass"), started(text)]
    found = open_nodes.users(PATHS, NamespaceScan(60.0), map(str, pids))
    assert [each.pid for each in found] == [pids[0], pids[2]]
    assert {each.nodes for each in found} == {("/dev/gpu0", "/dev/gpu1")}


def test_an_o_path_descriptor_does_not_count_as_open(started: Callable[[str], int]) -> None:
    assert nodes_of(started("one = os.open('/dev/full', os.O_PATH)")) == ()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may follow the links in map_files")
def test_a_process_with_a_mapped_node_is_found(started: Callable[[str], int]) -> None:
    text = "fd = os.open('/dev/zero', os.O_RDONLY)\n"
    text += f"kept = mmap.mmap(fd, 4096, {mmap.MAP_PRIVATE})\nos.close(fd)"
    assert nodes_of(started(text)) == ("/dev/gpu1",)


def test_an_ended_process_has_no_open_nodes() -> None:
    assert nodes_of(2**22 + 1) == ()


def test_the_search_for_open_nodes_stops_at_its_time_limit(started: Callable[[str], int]) -> None:
    pid = started("one = os.open('/dev/full', os.O_RDONLY)")
    look = NamespaceScan(0.0)
    assert open_nodes.users(PATHS, look, [str(pid)]) == []
    assert not look.is_whole

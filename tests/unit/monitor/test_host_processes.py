"""Processes that count: owned and started by the right user, in our namespaces, and alive."""

import ctypes
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fabricated import BOOT, Tree
from timeouts import in_time

from gpuhook.base.host import files as host_files
from gpuhook.monitor.host import processes as host_processes
from gpuhook.monitor.host.processes import Process, running

PR_SET_NAME = 15  # linux/prctl.h
ROOT = {0}


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path / "machine", lambda *_: b"")


def _found(tree: Tree, users: set[int]) -> list[int]:
    return [process.pid for process in running("dockerd", str(tree.root), users)]


def test_a_root_daemon_is_found_with_its_arguments(tree: Tree) -> None:
    tree.process(9, "/usr/bin/dockerd", "-H", "fd://", started=BOOT + 5, environ=["A=b=c"])
    [found] = running("dockerd", str(tree.root), ROOT)
    assert found.argv == ("/usr/bin/dockerd", "-H", "fd://")
    assert found.started == BOOT + 5
    assert found.environment == {"A": "b=c"}
    assert found.root == str(tree.root)


def test_a_daemon_with_a_long_name_is_found(tree: Tree) -> None:
    tree.process(9, "containerd-shim-runc-v2")
    assert len(running("containerd-shim-runc-v2", str(tree.root), ROOT)) == 1


@pytest.mark.protects(
    "ended-process", "other users: zombies and processes of containers aren't mistaken for daemons"
)
@pytest.mark.parametrize(
    "status",
    [
        {"Uid": "1000\t1000\t1000\t1000"},
        {"Uid": "1000\t0\t0\t0"},
        {"Uid": "0\t0\t1000\t0"},
        {"State": "Z (zombie)"},
        {"State": "X (dead)"},
        {"NSpid": "9\t1"},
        {"CapEff": "00000000a80425fb"},
        {"Name": "dockerd-proxy"},
    ],
    ids=lambda status: " ".join(f"{key} {value}" for key, value in status.items()),
)
def test_a_process_that_only_resembles_a_root_daemon_is_ignored(
    tree: Tree, status: dict[str, str]
) -> None:
    tree.process(9, "dockerd", status=status)
    assert _found(tree, ROOT) == []


@pytest.mark.protects(
    "set-user-id",
    "other users: set-user-ID programs and user namespaces' processes don't count as root",
    instead="return True",
)
def test_a_process_in_another_user_namespace_does_not_count_as_root(tree: Tree) -> None:
    tree.link("/proc/9/ns/user", "user:[2]")
    tree.process(9, "dockerd")
    assert _found(tree, ROOT) == []


@pytest.mark.protects(
    "set-user-id",
    "other users: set-user-ID programs and user namespaces' processes don't count as root",
    instead="return True",
)
def test_a_set_user_id_program_does_not_count_as_root(tree: Tree) -> None:
    tree.process(9, "dockerd")
    assert _found(tree, ROOT) == [9]
    (tree.root / "proc/9/exe").chmod(0o4755)
    assert _found(tree, ROOT) == []


def test_a_users_daemon_in_another_user_namespace_is_found(tree: Tree) -> None:
    tree.link("/proc/9/ns/user", "user:[2]")
    tree.process(9, "dockerd", uid=1000, status={"CapEff": "0"})
    assert _found(tree, {1000}) == [9]
    assert _found(tree, ROOT) == []


@pytest.mark.protects(
    "status-alone",
    "other users: only the status of their processes is read",
    instead='if not self._data("cmdline") or not self._is_believed(status, users):',
)
def test_only_the_status_of_other_users_processes_is_read(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The arguments of a process may lie in memory that can't be read without waiting forever."""
    tree.process(9, "dockerd", uid=1000)
    opened = []
    read = host_files.read_start

    def noting(path: str, most: int = host_files.MAX_BYTES) -> bytes:
        opened.append(path)
        return read(path, most)

    monkeypatch.setattr(host_files, "read_start", noting)
    assert _found(tree, ROOT) == []
    assert opened == [f"{tree.root}/proc/9/status"]


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["dockerd", "--config-file=/a"], ["/a"]),
        (["dockerd", "--debug", "--config-file", "/a", "--config-file=/b"], ["/a", "/b"]),
        (["dockerd", "--config-file"], []),
        (["dockerd", "--config-file-x=/a"], []),
    ],
)
def test_a_daemons_options_are_read_from_its_arguments(
    argv: list[str], expected: list[str]
) -> None:
    process = Process(1, 0, tuple(argv), 0, 0.0, None, "")
    assert process.option("--config-file") == expected


def test_a_daemons_file_is_recognised_by_any_of_its_paths(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    real.touch()
    link.symlink_to(real)
    ourselves = Process(os.getpid(), 0, (), 0, 0.0, None, "")
    assert ourselves.reads(str(link), str(real))
    assert not ourselves.reads(str(tmp_path), str(real))
    assert ourselves.reads("/no/such/file", "/no/such/../such/file")


# Real processes -----------------------------------------------------------------------------


@contextmanager
def _child(name: str, *, ends: bool = False) -> Iterator[int]:
    """Start a child process of that name; one that ``ends`` stays a zombie until afterwards."""
    ready, done = os.pipe()
    pid = os.fork()
    if pid == 0:
        ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode(), 0, 0, 0)
        os.write(done, b".")
        if ends:
            os._exit(0)
        while True:
            signal.pause()
    try:
        assert os.read(ready, 1) == b"."
        if ends:
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(ready)
        os.close(done)


def test_a_found_process_gets_its_signal() -> None:
    name = f"gp-own-{os.getpid()}"
    with in_time(), _child(name) as pid:
        [found] = [each for each in running(name) if each.pid == pid]
        assert found.root == ""
        assert host_processes.send(found, signal.SIGTERM)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert running(name) == []


def test_a_zombie_process_is_not_found() -> None:
    name = f"gp-end-{os.getpid()}"
    with _child(name, ends=True):
        assert running(name) == []


@pytest.mark.protects(
    "same-process", "other users: a signal isn't sent to a process that reused another's id"
)
def test_a_reused_process_id_is_not_signalled() -> None:
    with subprocess.Popen(["sleep", "100"]) as other:
        stale = Process(other.pid, os.geteuid(), ("dockerd",), 1, 0.0, None, "")
        assert not host_processes.send(stale, signal.SIGKILL)
        assert other.poll() is None
        other.kill()
    assert not host_processes.send(stale, signal.SIGKILL)

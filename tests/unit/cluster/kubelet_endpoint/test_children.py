"""The supervisor's children: listeners that hang or exit, and a server that reads nothing."""

import json
import os
import select
import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from gpuhook.base.config.model import Config
from gpuhook.base.errors import DriverError
from gpuhook.cluster.device_plugin.settings import Settings
from gpuhook.cluster.device_plugin.state import PluginState
from gpuhook.cluster.kubelet_endpoint.listener import Listener
from gpuhook.monitor.host.child import Channel, Work
from gpuhook.monitor.host.state_worker import StateWorker
from gpuhook.monitor.vendors.nvidia import events as nvidias


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Events:
    """A vendor's ``events``, whose children print the given lines and then wait."""

    BEAT = 10.0

    def __init__(self) -> None:
        self.lines = b""
        self.ends = False
        self.fails = False
        self.raises: Exception | None = None
        self.killed_by = 0
        self.begun: list[set[str]] = []

    def can_listen(self, inventory: object) -> bool:
        return inventory == "devices"

    def is_error(self, line: Mapping[str, Any]) -> bool:
        return nvidias.is_error(line)

    def begin(self, config: Config, inventory: object, but: Collection[str]) -> Work:
        if self.fails:
            raise DriverError("No NVML", "Install one")
        self.begun.append(set(but))
        return self.behave

    def behave(self, talk: Channel) -> None:
        os.write(talk._fd, self.lines)
        if self.raises is not None:
            raise self.raises
        if self.killed_by:
            os.kill(os.getpid(), self.killed_by)
        while not self.ends:
            signal.pause()


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def events() -> Events:
    return Events()


@pytest.fixture
def listener(events: Events, said: list[str], clock: Clock) -> Iterator[Listener]:
    made = Listener(events, "ACME", Config(), said.append, clock)
    yield made
    made.stop()
    wait_until(lambda: made.reap() is None and not made._zombies)


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def heard(listener: Listener, count: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []

    def is_enough() -> bool:
        found.extend(listener.read() if listener.fileno() >= 0 else ())
        return len(found) >= count

    wait_until(is_enough)
    return found


def test_events_are_read_and_invalid_or_partial_lines_are_ignored(
    listener: Listener, events: Events, said: list[str]
) -> None:
    events.lines = (
        b'{"asking": "a"}\n{"watched": 1, "unwatched": {"b": "Not Supported"}}\n{"beat": 1}\n'
        b'no JSON\n[1]\n{"xid": 79, "gpu": "a"}\n{"lost": "a", "why": "x"}\n{"xid": 1, "g'
    )
    listener.tend("devices")
    assert heard(listener, 2) == [{"xid": 79, "gpu": "a"}, {"lost": "a", "why": "x"}]
    assert said == ["ACME: These devices aren't watched for errors: b: Not Supported"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda each: (
        st.lists(each, max_size=3) | st.dictionaries(st.text(max_size=3), each, max_size=3)
    ),
    max_leaves=5,
)
NAMES = st.sampled_from(["asking", "watched", "unwatched", "xid", "gpu", "gi", "ci", "lost", "why"])


@hypothesis.given(st.lists(st.dictionaries(NAMES, JSON, max_size=5) | JSON, max_size=6))
def test_any_output_of_a_child_is_read_or_ignored(lines: list[Any]) -> None:
    reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    said: list[str] = []
    try:
        os.write(writer, b"".join(json.dumps(line).encode() + b"\n" for line in lines))
        listener = Listener(Events(), "ACME", Config(), said.append, Clock())
        listener._fd = reader
        for event in listener.read():
            if "lost" in event:
                assert isinstance(event["lost"] + event["why"], str)
            else:
                assert isinstance(event["gpu"], str)
                assert isinstance(event["xid"] + event.get("gi", 0) + event.get("ci", 0), int)
    finally:
        os.close(reader)
        os.close(writer)


def test_no_listener_is_started_without_devices_or_events(
    listener: Listener, events: Events
) -> None:
    listener.tend(None)
    listener.tend("a platform without events")
    assert (listener.pid, listener.deadline(), events.begun) == (0, None, [])


def test_a_listener_that_ends_is_restarted_after_growing_pauses(
    listener: Listener, events: Events, clock: Clock
) -> None:
    events.ends = True
    pauses = []
    for _ in range(7):
        listener.tend("devices")
        pid = listener.pid
        assert pid

        def has_ended() -> bool:
            listener.tend("devices")
            return not listener.pid

        wait_until(has_ended)
        assert listener.again is not None
        pauses.append(listener.again - clock.now)
        clock.now = listener.again
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize(
    ("raises", "killed_by", "reason"),
    [
        (RuntimeError("no"), 0, "RuntimeError: no"),
        (OSError(2, "No such file"), 0, "FileNotFoundError: [Errno 2] No such file"),
        (None, signal.SIGSEGV, "the listener for the driver's errors ended with signal 11"),
    ],
)
def test_the_end_of_a_listener_is_reported_once_and_no_event_is_lost(
    raises: Exception | None, killed_by: int, reason: str, reads: bool,
    listener: Listener, events: Events, said: list[str], clock: Clock,
) -> None:  # fmt: skip
    events.raises, events.killed_by = raises, killed_by
    events.lines = b'{"xid": 79, "gpu": "a"}\n'
    for _ in range(2):
        found: list[dict[str, Any]] = []
        listener.tend("devices")
        assert listener.pid

        def has_ended(found: list[dict[str, Any]] = found) -> bool:
            if reads and listener.fileno() >= 0:
                found += listener.read()
            found += listener.tend("devices")
            return not listener.pid

        wait_until(has_ended)
        assert found == [{"xid": 79, "gpu": "a"}]
        assert listener.again is not None
        clock.now = listener.again
    assert said == [f"ACME: {reason}"]


def test_a_device_in_which_the_listener_hangs_is_skipped_after_a_restart(
    listener: Listener, events: Events, clock: Clock, said: list[str]
) -> None:
    events.lines = b'{"asking": "a"}\n{"asking": "b"}\n'
    listener.tend("devices")
    first = listener.pid
    wait_until(lambda: listener.read() == [] and listener._asking == "b")
    limit = listener.deadline()
    assert limit is not None
    clock.now = limit - 0.1
    listener.tend("devices")
    assert listener.pid == first
    clock.now = limit
    listener.tend("devices")
    assert said == ["ACME: the driver hangs while querying b; listening is started again"]
    assert listener.silent == {"b"}
    assert listener.again is not None
    clock.now = listener.again
    listener.tend("devices")
    assert events.begun == [set(), {"b"}]
    wait_until(lambda: listener.reap() is None and not listener._zombies)


def test_a_listener_with_unread_output_is_not_killed(
    listener: Listener, events: Events, clock: Clock
) -> None:
    events.lines = b'{"watched": 1, "unwatched": {}}\n'
    listener.tend("devices")
    first = listener.pid
    wait_until(listener._has_spoken)
    clock.now += 1000.0
    listener.tend("devices")
    assert listener.pid == first
    assert listener.read() == []
    limit = listener.deadline()
    assert limit == clock.now + 30.0


def test_a_paused_listener_stays_stopped_until_the_pause_ends(
    listener: Listener, events: Events, clock: Clock
) -> None:
    listener.tend("devices")
    listener.let_go(60.0)
    listener.restart()  # must not end the pause
    clock.now += 59.0
    listener.tend("devices")
    assert not listener.pid
    clock.now += 1.0
    listener.tend("devices")
    assert listener.pid


def test_a_driver_without_events_is_reported_once(
    listener: Listener, events: Events, clock: Clock, said: list[str]
) -> None:
    events.fails = True
    for _ in range(3):
        listener.tend("devices")
        assert listener.again is not None
        clock.now = listener.again
    assert said == ["ACME: No NVML. Install one."]


def test_a_stopped_server_that_leaves_a_small_state_unread_is_restarted(
    said: list[str], clock: Clock
) -> None:
    """The socket's buffer has space for the state, so no write is pending."""
    reader, writer = os.pipe2(os.O_NONBLOCK)

    def serve(fd: int) -> int:
        while data := os.read(fd, 100):
            os.write(writer, data)
        return 0

    made = StateWorker(serve, "The server", "gpuhook-server", said.append, clock, (writer,))
    try:
        made.give(b"first\n")
        made.tend()
        first = made.pid
        wait_until(lambda: made.deadline() is None)
        assert os.read(reader, 100) == b"first\n"
        clock.now += 100.0
        made.tend()
        assert (made.pid, said) == (first, [])
        os.kill(first, signal.SIGSTOP)
        os.waitid(os.P_PID, first, os.WSTOPPED | os.WNOWAIT)
        made.give(b"second\n")
        assert made.wants() == -1
        deadline = made.deadline()
        assert deadline is not None
        clock.now = deadline
        made.tend()
        assert said == ["The server no longer reads; it is started again"]
        assert made.again is not None
        clock.now = made.again
        made.tend()
        assert made.pid not in {0, first}
        wait_until(lambda: select.select([reader], [], [], 0)[0] != [])
        assert os.read(reader, 100) == b"second\n"
    finally:
        made.end()
        os.close(reader)
        os.close(writer)


@pytest.fixture
def server(said: list[str], clock: Clock) -> Iterator[tuple[StateWorker, int]]:
    """A server that reads nothing, and a pipe that shows when it has been started."""
    reader, writer = os.pipe2(os.O_NONBLOCK)

    def serve(_: int) -> int:
        while True:
            os.write(writer, b"x")
            signal.pause()

    made = StateWorker(serve, "The server", "gpuhook-server", said.append, clock, (writer,))
    yield made, reader
    made.end()
    os.close(reader)
    os.close(writer)


def test_a_server_that_stops_reading_is_restarted(
    server: tuple[StateWorker, int], clock: Clock, said: list[str]
) -> None:
    made, _ = server
    made.tend()
    first = made.pid
    line = b"x" * (1 << 20) + b"\n"
    for _ in range(3):
        made.give(line)
    assert made.wants() >= 0
    deadline = made.deadline()
    assert deadline is not None
    clock.now = deadline
    made.tend()
    assert said == ["The server no longer reads; it is started again"]
    assert made.again is not None
    clock.now = made.again
    made.tend()
    assert made.pid not in {0, first}
    assert made.wants() >= 0  # the new server needs the last state
    wait_until(lambda: made.reap() is None and not made._zombies)


def test_only_the_last_waiting_state_is_kept(server: tuple[StateWorker, int]) -> None:
    made, _ = server
    made.give(PluginState().to_line())
    assert made.wants() == -1  # no server runs yet
    made.tend()
    assert made.wants() == -1  # the state fits into the pipe
    made.give(b"a" * (1 << 20) + b"\n")
    made.give(b"b\n")
    made.give(b"c\n")
    assert made._rest.endswith(b"a\n")
    assert (made._state, made._is_new) == (b"c\n", True)


def test_a_server_that_was_killed_is_not_killed_again(server: tuple[StateWorker, int]) -> None:
    """Its pid may belong to another process by then."""
    made, _ = server
    made.tend()
    os.kill(made.pid, signal.SIGKILL)
    made.end()
    assert made.pid == 0


def test_the_server_ends_with_its_supervisor_even_if_its_pipe_is_held() -> None:
    """A child that writes CDI specs, or a driver's child that hangs, holds the pipe's other end."""
    reader, writer = os.pipe()
    supervisor = os.fork()
    if supervisor == 0:
        settings = Settings(kubelet_folder="/nowhere")

        def serve(fd: int) -> int:
            from gpuhook.cluster.device_plugin import server  # noqa: PLC0415 - as the service does

            return server.PluginServer(settings, fd, lambda _: None).run()

        server = StateWorker(serve, "It", "gpuhook-server", lambda _: None, time.monotonic)
        server.tend()
        holder = os.fork()
        if holder:
            os.write(writer, f"{server.pid} {holder}\n".encode())
        signal.pause()
    os.close(writer)
    with open(reader) as words:
        server_pid, holder = map(int, words.readline().split())
    try:
        wait_until(lambda: name_of(server_pid) == "gpuhook-server")
        os.kill(supervisor, signal.SIGKILL)
        os.waitpid(supervisor, 0)
        wait_until(lambda: name_of(server_pid) != "gpuhook-server")
    finally:
        os.kill(holder, signal.SIGKILL)


def name_of(pid: int) -> str:
    """Return the name of a process, or "" if it has exited."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return ""
    return "" if "State:\tZ" in status else status.split()[1]

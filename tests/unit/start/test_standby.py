"""The process that stands ready: whom it kills, and what it knows of itself."""

import os
import select
import signal
import sys
import time

import pytest

from gpuhook.start import standby
from gpuhook.start.standby import Child, Server


class Late:
    """A child that was asked long ago; with ``word`` it has answered, and lives on."""

    def __init__(self, server: Server, word: bytes) -> None:
        reader, writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(reader)
            os.write(writer, word)
            signal.pause()
            os._exit(0)
        os.close(writer)
        if word:
            select.select([reader], [], [])
        self.child = Child(self.pid, reader)
        self.child.since = time.monotonic() - 60
        server._children[reader] = self.child
        server._poll.register(reader, select.POLLIN)

    def state(self) -> str:
        """Return how the child is, as ps has it."""
        with open(f"/proc/{self.pid}/stat", encoding="ascii") as file:
            return file.read().rpartition(")")[2].split()[0]

    def end(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.child.report)


@pytest.fixture
def server() -> Server:
    made = Server.__new__(Server)
    made._children, made._poll = {}, select.poll()
    return made


def test_late_child_is_killed(server: Server) -> None:
    late = Late(server, b"")
    try:
        server._kill_late()
        os.waitid(os.P_PID, late.pid, os.WEXITED | os.WNOWAIT)
        assert late.state() == "Z"
    finally:
        late.end()


def test_child_that_has_answered_is_no_late_one(server: Server) -> None:
    """Though its answer was not heard: on a busy machine, other work came first."""
    late = Late(server, standby._ANSWERED)
    try:
        server._kill_late()
        while (state := late.state()) == "T":
            time.sleep(0.01)
        assert state == "S"
        assert late.child.since == 0
    finally:
        late.end()


def test_every_module_of_ours_is_looked_at() -> None:
    files = standby._our_files()
    assert standby.__file__ in files
    assert sys.modules["gpuhook"].__file__ in files
    assert all(name.endswith(".py") for name in files)

"""Terminals that scripts/lib/own-console makes for test machines."""

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PROGRAM = Path(__file__).parents[2] / "scripts/lib/own-console"
PATIENCE = 300.0

# Behaves like a machine: it opens its console, hangs it up and opens it again, as a login does.
MACHINE = """
import fcntl, os, signal, sys, time
name = sys.argv[-1].removeprefix("--console=")
signal.signal(signal.SIGHUP, signal.SIG_IGN)
def login(text):
    fd = os.open(name, os.O_RDWR | os.O_NOCTTY)
    os.write(fd, text.encode())
    return fd
fd = login("first\\n")
if os.geteuid() == 0:
    fcntl.ioctl(fd, 0x5437)  # TIOCVHANGUP
os.close(fd)
time.sleep(0.5)
fd = login("second %d %d\\n" % os.get_terminal_size(os.open(name, os.O_RDWR | os.O_NOCTTY)))
typed = os.read(fd, 100)
os.write(fd, b"typed " + typed + b"\\n")
if typed == b"wait\\n":
    time.sleep(600)
sys.exit(7)
"""


@dataclass
class Caller:
    """The terminal on which own-console is called."""

    process: subprocess.Popen[bytes]
    fd: int
    text: str = ""

    def wait(self, words: str) -> None:
        end = time.monotonic() + PATIENCE
        while words not in self.text:
            left = end - time.monotonic()
            assert left > 0, (words, self.text)
            if select.select([self.fd], [], [], left)[0]:
                self.text += os.read(self.fd, 4096).decode()


@contextmanager
def called() -> Iterator[Caller]:
    """Start own-console on a terminal of 100 columns; its settings and owner must not change."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 33, 100, 0, 0))
    before = termios.tcgetattr(theirs)
    words = ["setsid", "--ctty", sys.executable, str(PROGRAM), sys.executable, "-c", MACHINE]
    with subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        try:
            yield Caller(process, ours)
            assert termios.tcgetattr(theirs) == before
            os.write(theirs, b"still there")  # a terminal that was hung up fails with EIO
        finally:
            process.kill()
            os.close(theirs)
            os.close(ours)


def test_a_hangup_stays_within_the_machine() -> None:
    with called() as caller:
        caller.wait("second 100 33")  # a hangup may discard what came before it
        os.write(caller.fd, b"hello\r")
        caller.wait("typed hello")
        assert caller.process.wait(PATIENCE) == 7


def test_the_console_ends_after_the_escape_key_three_times() -> None:
    with called() as caller:
        caller.wait("second")
        os.write(caller.fd, b"wait\r")
        caller.wait("typed wait")
        os.write(caller.fd, b"\x1d" * 3)
        assert caller.process.wait(PATIENCE) != 0

"""Processes that only take processor time: a known one to check the counting, or all there is."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from groups import Group, Groups

_KNOWN = 0.2  # seconds
_TOLERANCE = 0.05  # share of the known time

# Moves into the group $1, uses $2 seconds of processor time, prints its total, and waits.
_KNOWN_BURNER = """
import sys, time
with open(sys.argv[1] + "/cgroup.procs", "w") as file:
    file.write("0")
while time.process_time() < float(sys.argv[2]):
    pass
print(time.process_time(), flush=True)
sys.stdin.read()
"""
# Exits by itself if the benchmark is killed.
_ENDLESS_BURNER = """
import os
parent = os.getppid()
while os.getppid() == parent:
    for _ in range(1_000_000):
        pass
"""


@contextmanager
def busy(count: int, groups: Groups) -> Iterator[None]:
    """Have so many busy loops beside us.

    They are in a group of their own beside those of the containers: where the low-level runtime
    has the kernel share processors out among groups (cgroup v2), they get the share of one.
    """
    with ExitStack() as stack:
        if count:
            with groups.new().entered():
                for _ in range(count):
                    loop = stack.enter_context(subprocess.Popen(_python(_ENDLESS_BURNER)))
                    stack.callback(loop.kill)
        yield


def check_counting(group: Group) -> None:
    """Burn a known time as containers do; raise RuntimeError if the group counts another.

    One process is in a group of its own, which is gone when the sum is read, as a container's;
    one still stands then, as a helper does; and the benchmark itself must not count.
    """
    container = group.folder / "containers/burner"
    container.mkdir()
    before = group.seconds()
    with ExitStack() as stack:
        with group.entered():
            contained = stack.enter_context(_burner(container))
            standing = stack.enter_context(_burner(group.folder / "programs"))
            burned = _seconds_of(contained) + _seconds_of(standing)
            _burn()
        contained.communicate()
        container.rmdir()
        counted = group.seconds() - before
    if abs(counted - burned) > _TOLERANCE * burned:
        raise RuntimeError(f"The control groups counted {counted:.3f} s of {burned:.3f} s burned")


def _burn() -> None:
    until = time.process_time() + _KNOWN
    while time.process_time() < until:
        pass


def _burner(folder: Path) -> "subprocess.Popen[str]":
    command = [*_python(_KNOWN_BURNER), str(folder), str(_KNOWN)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _seconds_of(burner: "subprocess.Popen[str]") -> float:
    """Wait until a burner has burned; return the seconds that it took."""
    if burner.stdout is None or not (line := burner.stdout.readline()):
        raise RuntimeError("A process that burns a known time failed")
    return float(line)


def _python(code: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", code]

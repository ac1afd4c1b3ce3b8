"""Rounds: one container of every kind after the other, each time in another order."""

import random
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass

from containers import Container, Life, live
from kinds import EIGHT, PAUSED, RUNC
from machine import Machine

# Number of a container's lives after which everything is saved: inventory and words.
_LIVES_TO_SAVE = 2


@dataclass(frozen=True)
class Rounds:
    """What was measured, in seconds: bare interpreter starts, lives, and what a life took.

    ``processor`` is the processor time of a life: what was counted for the kind from the first
    round to the last (groups.Group), by the number of its lives.
    """

    units: list[float]
    lives: dict[str, list[Life]]
    processor: dict[str, float]

    @property
    def unit(self) -> float:
        """The median of the bare interpreter starts."""
        return statistics.median(self.units)

    def whole(self, name: str) -> list[float]:
        """Return the time of each whole life of a kind."""
        return [life.whole for life in self.lives[name]]

    def added(self, name: str) -> float:
        """Return the median of the differences to plain runc in the same round."""
        pairs = zip(self.whole(name), self.whole(RUNC), strict=True)
        return statistics.median(ours - theirs for ours, theirs in pairs)

    def multiple(self, name: str) -> float:
        """Return how many times the median of plain runc the median of a kind is."""
        return statistics.median(self.whole(name)) / statistics.median(self.whole(RUNC))

    def processor_share(self, name: str) -> float:
        """Return the processor time that a kind adds, as a share of plain runc's own."""
        return self.processor[name] / self.processor[RUNC] - 1


@dataclass(frozen=True)
class Calls:
    """Seconds of bare interpreter starts, and of calls that create nothing."""

    units: list[float]
    plain: list[float]
    ours: list[float]

    @property
    def added(self) -> float:
        """The median of the differences to the low-level runtime."""
        pairs = zip(self.ours, self.plain, strict=True)
        return statistics.median(ours - plain for ours, plain in pairs)

    @property
    def added_units(self) -> float:
        """The same in bare interpreter starts."""
        return self.added / statistics.median(self.units)


def measure(machine: Machine, found: dict[str, Container], rounds: int, rest: float) -> Rounds:
    """Start all kinds in turn."""
    for container in found.values():
        if container.before is not None:
            live(container.before, machine.bundles, machine.lower, rest)
        for _ in range(_LIVES_TO_SAVE):
            live(container, machine.bundles, machine.lower, rest)
    _bring_back(found)
    time.sleep(rest)
    counted = {name: -container.group.seconds() for name, container in found.items()}
    units: list[float] = []
    lives: dict[str, list[Life]] = {name: [] for name in found}
    for number in range(rounds):
        _bring_back(found)  # prefork servers may have been replaced in the last round
        time.sleep(rest)
        units.append(_bare_start(machine))
        for name in random.sample(list(found), len(found)):
            lives[name].append(live(found[name], machine.bundles, machine.lower, rest))
        print(f"\rround {number + 1} of {rounds} ", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    time.sleep(rest)
    for name, container in found.items():
        counted[name] += container.group.seconds()
    return Rounds(units, lives, {name: value / rounds for name, value in counted.items()})


def _bring_back(found: dict[str, Container]) -> None:
    for container in found.values():
        if container.config:
            container.group.bring_back(container.config)


def measure_calls(machine: Machine, found: dict[str, Container], count: int) -> Calls:
    """Make calls that create nothing, of the low-level runtime and of gpu-py in turn."""
    config = found[EIGHT].config
    environ = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "GPUHOOK_CONFIG": config}
    calls = Calls([], [], [])
    for _ in range(count):
        calls.units.append(_bare_start(machine))
        for runtime, values in (("runc", calls.plain), (machine.runtime, calls.ours)):
            began = time.perf_counter()
            subprocess.run([runtime, "state", "x"], env=environ, capture_output=True, check=False)
            values.append(time.perf_counter() - began)
    return calls


def measure_cold(
    machine: Machine, found: dict[str, Container], count: int, rest: float
) -> list[float]:
    """Return the times of lives before each of which the saved inventory was deleted."""
    times = []
    for _ in range(count):
        machine.forget(found[PAUSED].config)
        times.append(live(found[PAUSED], machine.bundles, machine.lower, rest).whole)
    return times


def _bare_start(machine: Machine) -> float:
    """Return the seconds that an interpreter takes to start and end."""
    began = time.perf_counter()
    subprocess.run([machine.python, "-I", "-S", "-c", "pass"], check=True)
    return time.perf_counter() - began

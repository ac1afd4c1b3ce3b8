"""Processor time and memory that processes use on the host, from /proc/PID/stat."""

import os
import time
from collections.abc import Callable
from typing import NamedTuple

from gpuhook.base.host import proc

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
# Places of the fields of proc(5) in the result of proc.stat_fields.
_UTIME, _STIME, _START, _RSS = 11, 12, 19, 21


class ProcessUse(NamedTuple):
    """Use of the host by a process; None for each unknown value.

    ``cpu_seconds`` is its processor time until now. ``cpu_utilization`` is the mean since the
    last sample, at first since its start; 1.0 is one processor. ``memory_bytes`` is what it has
    in memory (RSS).
    """

    cpu_seconds: float | None = None
    cpu_utilization: float | None = None
    memory_bytes: int | None = None


def _since_boot() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)  # the clock of processes' starts


class HostUse:
    """Use of the host by processes, sampled repeatedly."""

    def __init__(self, clock: Callable[[], float] = _since_boot) -> None:
        self._clock = clock
        self._before: dict[tuple[int, float], tuple[float, float]] = {}
        self._now: dict[tuple[int, float], tuple[float, float]] = {}

    def of(self, pid: int) -> ProcessUse:
        """Return a process's use; no values if it has exited."""
        fields = proc.stat_fields(proc.data_of(f"/proc/{pid}/stat"))
        try:
            user, system, start, pages = (
                int(fields[place]) for place in (_UTIME, _STIME, _START, _RSS)
            )
        except (IndexError, ValueError):
            return ProcessUse()
        seconds, started, now = (user + system) / _TICKS, start / _TICKS, self._clock()
        key = pid, started
        self._now[key] = now, seconds
        then, had = self._before.get(key, (started, 0.0))
        share = (seconds - had) / (now - then) if now > then else None
        return ProcessUse(seconds, share, pages * _PAGE)

    def end_sample(self) -> None:
        """Keep this sample's values for the next, and forget processes that weren't in it."""
        self._before, self._now = self._now, {}

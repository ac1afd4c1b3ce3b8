"""The processor time of fixed work on this host at this moment.

A limit in seconds is too strict on a slower host and too loose on a faster one. A test
therefore allows a multiple of the yardstick, which is measured right before or after.
"""

import gc
import json
import resource
import time
from collections.abc import Callable

_RECORD = {f"key {n}": [n, str(n), {"of": n / 7}] for n in range(100)}


def yardstick() -> float:
    """Return the processor time of fixed work, in seconds: about 0.03 on a host of 2024.

    Only a third of that work is measured.
    """
    return 3 * min(of_this_process(_work) for _ in range(3))


def _work() -> None:
    for _ in range(50):
        assert json.loads(json.dumps(_RECORD)) == _RECORD


def of_this_process(call: Callable[[], object]) -> float:
    """Return the processor time of a call, in seconds, without garbage collections.

    A collection goes through all objects that a pytest worker has collected, which takes 0.25
    s.
    """
    collects = gc.isenabled()
    gc.disable()
    begin = time.process_time()
    try:
        call()
        return time.process_time() - begin
    finally:
        if collects:
            gc.enable()


def costs_less(call: Callable[[], object], times: float, tries: int = 5) -> bool:
    """Tell whether a call takes less processor time than ``times`` yardsticks.

    A busy host slows either measurement for a moment, so a failed comparison is repeated.
    """
    return any(of_this_process(call) < times * yardstick() for _ in range(tries))


def of_children(call: Callable[[], object]) -> float:
    """Return the processor time of children that a call starts and waits for, in seconds."""
    begin = resource.getrusage(resource.RUSAGE_CHILDREN)
    call()
    end = resource.getrusage(resource.RUSAGE_CHILDREN)
    return end.ru_utime + end.ru_stime - begin.ru_utime - begin.ru_stime

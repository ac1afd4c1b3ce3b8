"""Processor time that plain work takes on this machine at this moment.

What a test allows in seconds is too little on a slower machine and too much on a faster one. It
allows so many times the yardstick instead, which is measured right before or after.
"""

import gc
import json
import resource
import time
from collections.abc import Callable

_RECORD = {f"key {n}": [n, str(n), {"of": n / 7}] for n in range(100)}


def yardstick() -> float:
    """Return the processor time of fixed work, in seconds: about 0.03 on a machine of 2024.

    It is measured on a third of that work.
    """
    return 3 * min(of_this_process(_work) for _ in range(3))


def _work() -> None:
    for _ in range(50):
        assert json.loads(json.dumps(_RECORD)) == _RECORD


def of_this_process(call: Callable[[], object]) -> float:
    """Return the processor time of a call, in seconds, without looks for garbage.

    Those go through all that a worker has collected of tests, which takes a quarter of a second.
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
    """Tell whether a call takes less processor time than so many yardsticks.

    A busy machine makes either of them slow for a moment, so both are measured again until it does.
    """
    return any(of_this_process(call) < times * yardstick() for _ in range(tries))


def of_children(call: Callable[[], object]) -> float:
    """Return the processor time of the processes that a call starts and waits for, in seconds."""
    begin = resource.getrusage(resource.RUSAGE_CHILDREN)
    call()
    end = resource.getrusage(resource.RUSAGE_CHILDREN)
    return end.ru_utime + end.ru_stime - begin.ru_utime - begin.ru_stime

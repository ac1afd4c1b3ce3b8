"""Storms: many containers of one kind that start at the same moment."""

import random
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from threading import Barrier

from containers import Bundle, Container, live
from kinds import EIGHT, NO_GPU, PLAIN, RUNC, SLOW
from machine import Machine

NOTHING_SAVED = f"{SLOW}, nothing saved"

_REST = 1.0  # seconds between the last preparation and the storm


@dataclass(frozen=True)
class Storm:
    """How long each container of a storm took, in seconds, and why others failed."""

    times: list[float]
    failures: list[str]


def storms(
    machine: Machine, found: dict[str, Container], count: int, repetitions: int, rest: float
) -> dict[str, list[Storm]]:
    """Return storms of so many containers for each kind, all kinds in turn, in random order."""
    stormed = {name: found[name] for name in (RUNC, NO_GPU, EIGHT, PLAIN)}
    stormed[NOTHING_SAVED] = found[SLOW]
    results: dict[str, list[Storm]] = {name: [] for name in stormed}
    for number in range(repetitions):
        for name in random.sample(list(stormed), len(stormed)):
            # This start keeps the prefork server running, however long the other storms took.
            live(stormed[name], machine.bundles, machine.lower, rest)
            if name == NOTHING_SAVED:
                machine.forget(stormed[name].config)
            results[name].append(_storm(machine, stormed[name], count))
        print(f"\rstorm {number + 1} of {repetitions} ", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return results


def slowest(results: list[Storm]) -> float:
    """Return the median over storms of the seconds that the slowest container took."""
    return statistics.median(max(storm.times) for storm in results)


def slowness(results: list[Storm], plain: list[Storm]) -> float:
    """Return the median over storms of the slowest's time over that of plain runc's slowest."""
    pairs = zip(results, plain, strict=True)
    return statistics.median(max(ours.times) / max(theirs.times) for ours, theirs in pairs)


def failures(results: list[Storm]) -> list[str]:
    """Return why containers failed, one entry for each."""
    return [failure for storm in results for failure in storm.failures]


def _storm(machine: Machine, container: Container, count: int) -> Storm:
    """Start so many containers at once; RuntimeError if all of them fail.

    All bundles are made before and unmade after, and the machine rests in between.
    """
    bundles = [Bundle(container, machine.bundles, machine.lower) for _ in range(count)]
    with ExitStack() as stack:
        for bundle in bundles:
            stack.enter_context(bundle.prepared())
        stack.enter_context(container.group.entered())
        time.sleep(_REST)
        with ThreadPoolExecutor(count) as pool:
            results = list(pool.map(partial(_timed, Barrier(count)), bundles))
    times = [result for result in results if isinstance(result, float)]
    failed = [result for result in results if isinstance(result, str)]
    if not times:
        raise RuntimeError(f"All {count} containers of a storm failed: {failed[0]}")
    return Storm(times, failed)


def _timed(start: Barrier, bundle: Bundle) -> float | str:
    """Return the seconds that a container's life took, or why it failed."""
    start.wait()
    try:
        return bundle.live().whole
    except (RuntimeError, OSError) as error:
        return str(error)

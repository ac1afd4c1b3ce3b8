"""What was measured, in tables and as JSON."""

import json
import os
import platform
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

from budget import Results, budget
from kinds import RUNC
from machine import run
from rounds import Calls, Rounds
from storms import Storm, failures, slowest, slowness

_SHOWN_FAILURES = 3
_WIDTH = 35  # characters for the name of a kind


def print_rounds(rounds: Rounds, busy: int, others: list[str]) -> None:
    """Print a line for each kind of container; beside busy loops, as a multiple of plain runc."""
    print(f"1 unit, a bare interpreter start: {_milliseconds(rounds.units)} ms")
    if busy:
        print(f"beside {busy} busy loops, the interpreter starts as well")
    times = f" {'times':>6}" if busy else ""
    for number, other in enumerate(others, 1):
        print(f"against {number}: {other}")
    print(
        f"\n{'whole life of a container':{_WIDTH}} {'ms, median (quartiles)':22} {'added':>6} "
        f"{'units':>6}{times} {'processor ms':>12} {'share added':>11}"
    )
    for name in rounds.lives:
        added = rounds.added(name)
        times = f" {rounds.multiple(name):6.2f}" if busy else ""
        print(
            f"{name:{_WIDTH}} {_milliseconds(rounds.whole(name)):22} {added * 1e3:6.1f} "
            f"{added / rounds.unit:6.2f}{times} "
            f"{rounds.processor[name] * 1e3:12.1f} {rounds.processor_share(name):11.2f}"
        )


def print_calls(calls: Calls) -> None:
    """Print what one call adds that creates nothing."""
    print(
        f"\none call that creates nothing adds {calls.added * 1e3:.2f} ms, "
        f"{calls.added_units:.2f} units"
    )


def print_cold(times: list[float]) -> None:
    """Print what a life takes that has to ask NVML first."""
    print(f"8 GPUs, nothing saved, nvmlInit free: {_milliseconds(times)} ms")


def print_storms(storms: dict[str, list[Storm]], count: int) -> None:
    """Print a line for each kind, with medians over its storms."""
    title = f"{count} containers at once, {len(storms[RUNC])} times"
    print(f"\n{title:{_WIDTH}} {'failed':>6} {'slowest':>8} {'median':>8} {'slowest, of runc':>16}")
    for name, results in storms.items():
        failed = failures(results)
        median = statistics.median(statistics.median(storm.times) for storm in results)
        print(
            f"{name:{_WIDTH}} {len(failed):6} {slowest(results):6.2f} s {median:6.2f} s "
            f"{slowness(results, storms[RUNC]):16.2f}"
        )
        for failure in failed[:_SHOWN_FAILURES]:
            print(f"    {failure}")


def print_budget(results: Results) -> None:
    """Print every line of the budget with its mark."""
    print(f"\n{'budget':51} {'measured':>8} {'must':>5} {'aim':>5}")
    for row in budget(results):
        value = "" if row.value is None else f"{row.value:.2f}"
        print(f"{row.what:51} {value:>8} {row.must:5.2f} {row.aim:5.2f}  {row.mark}")


def write_json(path: str, arguments: dict[str, Any], results: Results) -> None:
    """Write all numbers, in seconds where nothing else is said."""
    rounds = results.rounds
    kinds = {
        name: {
            "added": rounds.added(name),
            "added_units": rounds.added(name) / rounds.unit,
            "multiple_of_runc": rounds.multiple(name),
            "processor": rounds.processor[name],
            "processor_share_added": rounds.processor_share(name),
            "lives": [asdict(life) | {"whole": life.whole} for life in lives],
        }
        for name, lives in rounds.lives.items()
    }
    storms = {
        name: {
            "slowest": slowest(repeated),
            "slowest_of_runc": slowness(repeated, results.storms[RUNC]),
            "storms": [asdict(storm) for storm in repeated],
        }
        for name, repeated in results.storms.items()
    }
    document = {
        "arguments": arguments,
        "machine": {
            "kernel": platform.release(),
            "processors": os.cpu_count(),
            "runc": run("runc", "--version"),
        },
        "unit": rounds.unit,
        "units": rounds.units,
        "kinds": kinds,
        "calls": asdict(results.calls) | {"added_units": results.calls.added_units},
        "nothing_saved": results.cold,
        "storms": storms,
        "budget": [asdict(row) | {"mark": row.mark} for row in budget(results)],
    }
    Path(path).write_text(json.dumps(document, indent=1) + "\n")


def _milliseconds(values: list[float]) -> str:
    """Return the median with the quartiles, in milliseconds."""
    low, median, high = (value * 1e3 for value in statistics.quantiles(values, n=4))
    return f"{median:.1f} ({low:.1f} to {high:.1f})"

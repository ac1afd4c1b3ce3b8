#!/usr/bin/env python3
"""Measure what gpuhook adds to a container's start, beside the plain low-level runtime.

    sudo benchmarks/startup.py [--rounds N] [--storm N] [--against PATH]...

All kinds of containers are started in turn, round after round and each time in another order,
so that whatever else the machine does meets all of them alike. What is printed of each: the
median with the quartiles of create + start + end + delete, the median of the differences to
plain runc in the same round, and that in units of one bare interpreter start
(python3 -I -S -c pass).
"""

import argparse
import random
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Barrier

from containers import Bundle, Container, live
from machine import Machine, installed, isolate, new_disk

SOME = "NVIDIA_DRIVER_CAPABILITIES=compute,utility"
EVERY = "NVIDIA_DRIVER_CAPABILITIES=all"
ALL = "NVIDIA_VISIBLE_DEVICES=all"
RUNC = "plain runc"
NO_GPU = "no GPU"
EIGHT = "8 GPUs"
PLAIN = "8 GPUs, no helper"
SLOW = "8 GPUs, nvmlInit 2 s"

# After so many lives of a container all is saved that can be: inventory and words.
_LIVES_TO_SAVE = 2
_REST = 1.0  # seconds


def kinds(machine: Machine, others: list[str]) -> dict[str, Container]:
    """Return every kind of container to measure, by the name that the table has for it."""
    runc = Container("runc")
    ours = Container(machine.runtime, config=str(machine.config()))
    eight = replace(ours, environ=(ALL, SOME))

    def by(config: Path) -> Container:
        return replace(eight, config=str(config))

    found = {
        RUNC: runc,
        "plain runc, an empty hook": replace(runc, hook="/bin/true"),
        NO_GPU: ours,
        "1 GPU": replace(ours, environ=("NVIDIA_VISIBLE_DEVICES=0", SOME)),
        EIGHT: eight,
        "8 GPUs, all capabilities": replace(ours, environ=(ALL, EVERY)),
        PLAIN: by(machine.config(helper=False)),
        "8 GPUs, mode spec": by(machine.config(mode="spec")),
        "8 GPUs, nvmlInit 50 ms": by(machine.config(0.05)),
        SLOW: by(machine.config(2.0)),
        "8 GPUs, nvmlInit 2 s, no helper": by(machine.config(2.0, helper=False)),
    }
    for other in others:
        name = Path(other).name
        found[f"{name}: {NO_GPU}"] = Container(other)
        found[f"{name}: {EIGHT}"] = Container(other, eight.environ)
    return found


def bare_start(machine: Machine) -> float:
    """Return the seconds that an interpreter takes to start and end."""
    began = time.perf_counter()
    subprocess.run([machine.python, "-I", "-S", "-c", "pass"], check=True)
    return time.perf_counter() - began


def measure(machine: Machine, found: dict[str, Container], rounds: int) -> None:
    """Start all kinds in turn, and print the table."""
    for container in found.values():
        for _ in range(_LIVES_TO_SAVE):
            live(container, machine.bundles, machine.lower)
    units: list[float] = []
    times: dict[str, list[float]] = {name: [] for name in found}
    for number in range(rounds):
        units.append(bare_start(machine))
        for name in random.sample(list(found), len(found)):
            times[name].append(live(found[name], machine.bundles, machine.lower).whole)
        print(f"\rround {number + 1} of {rounds} ", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    unit = statistics.median(units)
    print(f"1 unit, a bare interpreter start: {unit * 1e3:.1f} ms ({spread(units)})\n")
    print(
        f"{'whole life of a container':32} {'ms, median (quartiles)':26} {'added':>7} {'units':>6}"
    )
    for name, values in times.items():
        added = statistics.median(a - b for a, b in zip(values, times[RUNC], strict=True))
        median = f"{statistics.median(values) * 1e3:.1f} ({spread(values)})"
        print(f"{name:32} {median:26} {added * 1e3:7.1f} {added / unit:6.2f}")


def spread(values: list[float]) -> str:
    """Return the quartiles in milliseconds."""
    low, _, high = statistics.quantiles(values, n=4)
    return f"{low * 1e3:.1f} to {high * 1e3:.1f}"


def measure_calls(machine: Machine, rounds: int) -> None:
    """Print what one call adds that creates nothing."""
    times: dict[str, list[float]] = {"runc": [], machine.runtime: []}
    environ = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "GPUHOOK_CONFIG": str(machine.config())}
    units = []
    for _ in range(rounds * 4):
        units.append(bare_start(machine))
        for runtime, values in times.items():
            began = time.perf_counter()
            subprocess.run([runtime, "state", "x"], env=environ, capture_output=True, check=False)
            values.append(time.perf_counter() - began)
    theirs, ours = times.values()
    added = statistics.median(a - b for a, b in zip(ours, theirs, strict=True))
    unit = statistics.median(units)
    print(f"\none call that creates nothing adds {added * 1e3:.2f} ms, {added / unit:.2f} units")


def measure_cold(machine: Machine, found: dict[str, Container], rounds: int) -> None:
    """Print what a start costs that has to ask NVML first."""
    values = []
    for _ in range(max(rounds // 3, 2)):
        machine.forget(found[EIGHT].config)
        values.append(live(found[EIGHT], machine.bundles, machine.lower).whole)
    median = statistics.median(values) * 1e3
    print(f"8 GPUs, nothing saved, nvmlInit free: {median:.0f} ms ({spread(values)})")


def storm(machine: Machine, container: Container, name: str, count: int) -> None:
    """Start many at once; print how many failed, and how long the slowest took.

    All bundles are made before and unmade after, and the machine rests in between.
    """
    bundles = [Bundle(container, machine.bundles, machine.lower) for _ in range(count)]
    for bundle in bundles:
        bundle.set_up()
    time.sleep(_REST)
    with ThreadPoolExecutor(count) as pool:
        together = partial(_timed, Barrier(count))
        results = list(pool.map(together, bundles))
    for bundle in bundles:
        bundle.tear_down()
    times = [result for result in results if isinstance(result, float)]
    failures = [result for result in results if isinstance(result, str)]
    told = f"{count} at once: {name:36} {len(failures)} failed"
    if times:
        told += f", slowest {max(times):.2f} s, median {statistics.median(times):.2f} s"
    print("\n    ".join((told, *failures[:3])))


def _timed(start: Barrier, bundle: Bundle) -> float | str:
    """Return the seconds that a container's life took, or why it failed."""
    start.wait()
    try:
        return bundle.live().whole
    except (RuntimeError, OSError) as error:
        return str(error)


def main() -> None:
    """Read the command line, build the machine, measure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--storm", type=int, default=100, help="how many at once; 0: no storm")
    parser.add_argument("--runtime", help="an installed gpu-py; else this tree is installed")
    parser.add_argument(
        "--against", action="append", default=[], metavar="PATH", help="a runtime to run beside"
    )
    arguments = parser.parse_args()
    runtime = arguments.runtime or installed()
    isolate()
    with new_disk() as folder:
        machine = Machine(folder, runtime)
        machine.build()
        found = kinds(machine, arguments.against)
        measure(machine, found, arguments.rounds)
        measure_calls(machine, arguments.rounds)
        measure_cold(machine, found, arguments.rounds)
        if arguments.storm:
            for name in (RUNC, NO_GPU, EIGHT, PLAIN):
                storm(machine, found[name], name, arguments.storm)
            machine.forget(found[SLOW].config)
            storm(machine, found[SLOW], f"{SLOW}, nothing saved", arguments.storm)


if __name__ == "__main__":
    main()

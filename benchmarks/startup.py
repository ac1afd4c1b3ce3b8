#!/usr/bin/env python3
"""Measure what gpuhook adds to a container's start, beside the plain low-level runtime.

    sudo benchmarks/startup.py [--rounds N] [--storm N] [--busy N] [--against PATH]...

All kinds of containers are started in turn, round after round and each time in another order,
so that whatever else the machine does meets all of them alike. What is printed of each: the
median with the quartiles of create + start + end + delete, the median of the differences to
plain runc in the same round, and that in units of one bare interpreter start
(python3 -I -S -c pass); then the processor time of all that was started for a container, from
the first round to the last and divided by their number (groups.py says what is counted), and
what is added to plain runc's as a share of it. At the end stands what the budget asks for.
"""

import argparse
import signal
import sys
from types import FrameType
from typing import NoReturn

import report
from budget import Results
from burners import busy, check_counting
from groups import Groups, new_groups
from kinds import kinds
from machine import Machine, installed, isolate, new_disk
from rounds import measure, measure_calls, measure_cold
from storms import storms

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main() -> None:
    """Read the command line, build the machine, measure, and undo all of it."""
    arguments = _read_arguments()
    for number in _ENDING:
        signal.signal(number, _end)
    runtime = arguments.runtime or installed()
    isolate()
    with new_disk() as folder, new_groups() as groups:
        check_counting(groups.new())
        machine = Machine(folder, runtime)
        machine.build()
        with busy(arguments.busy, groups):
            results = _measure_all(machine, groups, arguments)
    report.print_budget(results)
    if arguments.json:
        report.write_json(arguments.json, vars(arguments), results)


def _read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15, help="2 or more")
    parser.add_argument("--storm", type=int, default=100, help="how many at once; 0: no storm")
    parser.add_argument("--storms", type=int, default=3, help="how many storms of each kind")
    parser.add_argument("--busy", type=int, default=0, help="how many busy loops to run beside")
    parser.add_argument(
        "--rest", type=float, default=0.03, help="seconds without work before each container"
    )
    parser.add_argument("--runtime", help="an installed gpu-py; else this tree is installed")
    parser.add_argument(
        "--against", action="append", default=[], metavar="PATH", help="a runtime to run beside"
    )
    parser.add_argument("--json", metavar="FILE", help="write all numbers into a file")
    arguments = parser.parse_args()
    if arguments.rounds < 2:
        parser.error("there are no quartiles of less than 2 rounds")
    return arguments


def _measure_all(machine: Machine, groups: Groups, arguments: argparse.Namespace) -> Results:
    """Measure one thing after the other, and print each when it is there."""
    rest = arguments.rest
    found = kinds(machine, groups, arguments.against)
    rounds = measure(machine, found, arguments.rounds, rest)
    report.print_rounds(rounds, arguments.busy, arguments.against)
    calls = measure_calls(machine, found, arguments.rounds * 4)
    report.print_calls(calls)
    cold = measure_cold(machine, found, max(arguments.rounds // 3, 2), rest)
    report.print_cold(cold)
    stormed = {}
    if arguments.storm and arguments.storms:
        stormed = storms(machine, found, arguments.storm, arguments.storms, rest)
        report.print_storms(stormed, arguments.storm)
    return Results(arguments.busy, rounds, calls, cold, stormed)


def _end(number: int, _frame: FrameType | None) -> NoReturn:
    """End as after any other error, so that what we made is undone; nothing disturbs that."""
    for each in _ENDING:
        signal.signal(each, signal.SIG_IGN)
    sys.exit(128 + number)


if __name__ == "__main__":
    main()

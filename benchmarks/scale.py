#!/usr/bin/env python3
"""What a start, `gpuhook list` and a scrape cost as the containers of a node become many.

Run as root, with gpuhook[test] installed, on a machine that is quiet:

    python benchmarks/scale.py [--containers 0 500 2000] [--gpus 16] [--rounds 15]

The containers are those of metrics.py: a sleeping process each, with a record, a cgroup and a root
of its own, and a pause container beside it. Starts are whole lives through runc beside plain runc,
as in startup.py, while a process stands ready.
"""

import argparse
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from containers import Bundle, Container
from groups import Groups, new_groups
from machine import Machine, installed, isolate, new_disk
from metrics import MIGS, Node, print_list, print_scrapes

_ASKS = ("NVIDIA_VISIBLE_DEVICES=0:0", "NVIDIA_DRIVER_CAPABILITIES=compute,utility")
_REST = 0.05  # seconds without work before and after each
_WARM = 3  # lives before those that count: the first leaves a process that stands


def print_starts(machine: Machine, groups: Groups, config: str, rounds: int) -> None:
    """Print what starts take, plain runc's beside ours in each round."""
    plain = Container(groups.new(), "runc")
    ours = Container(groups.new(), machine.runtime, _ASKS, config)
    for _ in range(_WARM):
        measure(machine, ours)
    pairs = [(measure(machine, plain), measure(machine, ours)) for _ in range(rounds)]
    added = statistics.median(our[0] - base[0] for base, our in pairs)
    spent = statistics.median(our[1] - base[1] for base, our in pairs)
    share = spent / statistics.median(base[1] for base, _ in pairs)
    print(f"start: added {added:.1f} ms, {spent:.1f} ms of processor time ({share:.2f} of plain's)")


def measure(machine: Machine, kind: Container) -> tuple[float, float]:
    """Lead one container through life; return its milliseconds, and those of processor time."""
    bundle = Bundle(kind, machine.bundles, machine.lower)
    with bundle.prepared():
        time.sleep(_REST)
        if kind.config:
            kind.group.bring_back(kind.config)
        with kind.group.entered():
            before = kind.group.seconds()
            life = bundle.live()
        time.sleep(_REST)
        return life.whole * 1e3, (kind.group.seconds() - before) * 1e3


def main() -> None:
    """Measure each number of containers on a node of its own."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--containers", type=int, nargs="+", default=[0, 500, 2000])
    parser.add_argument("--gpus", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=15)
    chosen = parser.parse_args()
    runtime = installed()
    isolate()
    with new_disk() as disk, new_groups() as groups:
        machine = Machine(disk, runtime)
        machine.build()
        for number in chosen.containers:
            with tempfile.TemporaryDirectory(prefix="scale-", dir="/run") as folder:
                node = Node(Path(folder), chosen.gpus)
                try:
                    node.fill(number)
                    print(f"{number} containers, {chosen.gpus} GPUs of {MIGS} MIG devices")
                    print_starts(machine, groups, str(node.config), chosen.rounds)
                    print_list(node.config)
                    print_scrapes(node.config)
                finally:
                    node.end()
                    subprocess.run(["umount", "-R", node.root, node.folder / "upper"], check=False)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""What a start, `gpuhook list` and a scrape cost as containers or devices of a node become many.

Run as root, with gpuhook[test] installed, on a machine that is quiet:

    python benchmarks/scale.py [--containers 0 500 2000] [--gpus 16] [--rounds 15]
    python benchmarks/scale.py --containers 0 --gpus 1 16 64

The containers are those of metrics.py: a sleeping process each, with a record, a cgroup and a root
of its own, and a pause container beside it. Starts are whole lives through runc beside plain runc,
as in startup.py, while a prefork server runs. Each GPU has seven MIG devices; the inventory is
what a first start asks of the driver, and saves.
"""

import argparse
import itertools
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from containers import Bundle, Container
from groups import Groups, new_groups
from machine import Machine, installed, isolate, new_disk
from metrics import COMMAND, MIGS, Node, print_list, print_scrapes

_ASKS = ("NVIDIA_VISIBLE_DEVICES=0:0", "NVIDIA_DRIVER_CAPABILITIES=compute,utility")
_REST = 0.05  # seconds without work before and after each measurement
_COMMANDS = 5  # number of runs of each command
_WARM = 3  # container lives before the measured ones; the first one leaves a prefork server


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


def print_commands(node: Node) -> None:
    """Print what the commands take that write down all of a machine's devices."""
    folder = node.folder / "driver-folder"
    for name, words in {
        "inventory and what is saved of it": ["refresh", f"--config={node.config}"],
        "a CDI document": ["cdi", "generate", f"--config={node.config}"],
        "a driver folder": ["driver-folder", f"--config={node.config}", folder],
    }.items():
        times = []
        for _ in range(_COMMANDS):
            before = time.perf_counter()
            subprocess.run([COMMAND, *words], check=True, stdout=subprocess.DEVNULL)
            times.append(time.perf_counter() - before)
        print(f"{name}: {statistics.median(times):.2f} s (most {max(times):.2f})")


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
    parser.add_argument("--gpus", type=int, nargs="+", default=[16])
    parser.add_argument("--rounds", type=int, default=15)
    chosen = parser.parse_args()
    runtime = installed()
    isolate()
    with new_disk() as disk, new_groups() as groups:
        machine = Machine(disk, runtime)
        machine.build()
        for number, gpus in itertools.product(chosen.containers, chosen.gpus):
            with tempfile.TemporaryDirectory(prefix="scale-", dir="/run") as folder:
                node = Node(Path(folder), gpus)
                try:
                    node.fill(number)
                    print(f"{number} containers, {gpus} GPUs of {MIGS} MIG devices")
                    print_starts(machine, groups, str(node.config), chosen.rounds)
                    print_commands(node)
                    print_list(node.config)
                    print_scrapes(node.config)
                finally:
                    node.end()
                    subprocess.run(["umount", "-R", node.root, node.folder / "upper"], check=False)


if __name__ == "__main__":
    main()
